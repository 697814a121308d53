"""``report`` and ``export``: commands on a finished run, and how its models are opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.cli.base import Json, print_text, say
from fedtailor.errors import InvalidArgument

if TYPE_CHECKING:
    from fedtailor.runs.models import Saved

Where = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a finished run or comparison.")]
Client = Annotated[str | None, typer.Option(help="Whose model.")]
Method = Annotated[str | None, typer.Option(help="Which method of a comparison (default: the best on validation).")]


def report(
    where: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a finished run, comparison or advice.")],
    to: Annotated[Path | None, typer.Option(help="The file to write (default: report.html in the directory).")] = None,
    figures: Annotated[Path | None, typer.Option(help="Write its pictures to this folder too, as SVG and PDF.")] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a run, a comparison or an advice anew, from what is on disk."""
    from fedtailor.report import advice
    from fedtailor.report.page import headline, write
    from fedtailor.runs.contents import readable
    from fedtailor.runs.folder import failures_of, read, yardsticks_in
    from fedtailor.runs.layout import HISTORY, SUMMARY

    if (where / advice.ADVICE).exists() and not any((where / name).exists() for name in (HISTORY, SUMMARY)):
        values, sweep = advice.read(where)
        page, best = advice.write(values, to or where / "report.html", sweep=sweep), values["algorithm"]
    else:
        with readable(where):
            records = read(where)
            best = headline(records)["best"]
            more = {"failed": failures_of(where), "yardsticks": yardsticks_in(where), "explained": _explained(where)}
            page = write(records, to or where / "report.html", command=f"fedtailor report {where}", **more)
    written = []
    if figures is not None:
        from fedtailor.report import pictures

        written = [str(path) for path in pictures.write(page.read_text(), figures)]
    if as_json:
        print_text(json.dumps({"report": str(page), "best": best, "figures": written}, indent=2))
        return
    print_text(f"The report is in {page}." + (f" {len(written)} figures are in {figures}." if written else ""))


def _explained(where: Path) -> Any:
    """Return what the report of a run says of its models, where its table is still there."""
    from fedtailor.cli.own_data import own_federation
    from fedtailor.engine.explain import for_report
    from fedtailor.errors import DamagedRun, FedtailorError
    from fedtailor.runs import models
    from fedtailor.runs.contents import open_contents

    contents = open_contents(where)
    if contents.config.get("command") == "compare" or not contents.finished:
        return None, []
    try:
        saved = models.read_from(contents)
        return for_report(saved, own_federation(where, saved, None)[1]) if saved.schema is not None else (None, [])
    except DamagedRun:
        raise
    except FedtailorError as error:
        say(f"what the models rest on is not shown: {error}")
        return None, []


def export(
    where: Where,
    client: Client = None,
    method: Method = None,
    to: Annotated[
        Path | None, typer.Option(help="The file to write (default: model.safetensors or model.onnx); with --all, a directory.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="One file per client.")] = False,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="As ONNX, which takes the raw columns (linear, mlp and cnn models).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a client's model (without --client: the shared one) for other programs.

    It is a safetensors file with torch's names, whose metadata has features, fills, scales and classes; or with --onnx a graph
    that takes raw columns and gives probabilities or numbers, checked against the run's own predictions where onnxruntime is
    installed. With --all, index.json in the directory says which file is whose.
    """
    from fedtailor.cli.escape import file_names
    from fedtailor.runs import files
    from fedtailor.runs.contents import readable
    from fedtailor.runs.layout import refuse_links_between

    saved = open_models(where, method)
    ending = "onnx" if onnx else "safetensors"
    to = to or Path("models" if every else f"model.{ending}")
    file_of = {name: f"{file}.{ending}" for name, file in file_names(saved.clients).items()} if every else {}
    path_of: dict[str | None, Path] = {name: to / file for name, file in file_of.items()} if every else {client: to}
    apart: list[float | None] = []
    for path in {to, *path_of.values()}:
        refuse_links_between(where, path)
    for name, path in path_of.items():
        with readable(where):
            data, difference = _exported(saved, name, onnx)
        apart.append(difference)
        files.write(path, data)
    if every:
        files.write_json(to / "index.json", file_of)
    written = [str(path) for path in path_of.values()]
    known = [difference for difference in apart if difference is not None]
    if onnx and not known:
        say("not checked against the run's own predictions, because onnxruntime is not installed")
    if as_json:
        print_text(json.dumps({"written": written} | ({"difference": max(known, default=None)} if onnx else {}), indent=2))
        return
    checked = f" (within {max(known):.1g} of the run's own predictions)" if known else ""
    print_text(f"{len(written)} written: {to}{checked}")


def _exported(saved: Saved, client: str | None, onnx: bool) -> tuple[bytes, float | None]:
    """The file of a client's model, and how far an ONNX file's answers are from our own, where that could be checked."""
    if not onnx:
        from fedtailor.runs.portable import safetensors_of

        return safetensors_of(saved, client), None
    from fedtailor.runs.onnx_graph import check, onnx_of

    data = onnx_of(saved, client)
    return data, check(data, saved, client)


def open_models(where: Path, method: str | None) -> Saved:
    """The models of a run; of a comparison, those of a method (the best on validation unless it is named)."""
    return open_run(where, method)[1]


def open_run(where: Path, method: str | None) -> tuple[Path, Saved]:
    """The directory of a run, or of the run of a comparison that ``open_models`` speaks of, and its models."""
    from fedtailor.errors import nearest
    from fedtailor.report.page import headline
    from fedtailor.runs import folder, models
    from fedtailor.runs.contents import note_missing_digests, open_contents, readable
    from fedtailor.runs.layout import RUNS

    contents = open_contents(where)
    note_missing_digests(contents)
    if contents.config.get("command") != "compare":
        return where, models.read_from(contents)
    with readable(where):
        summary = folder.summary_of(contents)
        if method is None:
            method = headline(folder.records_of(contents))["best"]
            say(f"{method} was best on validation; its models are used")
        for label, reason in summary.get("failed", {}).items():
            if label.lower() == method.lower():
                raise InvalidArgument(f"{label} failed ({reason}) and has no models; name another method")
        folder_of = {label.lower(): name for label, name in summary["methods"].items()}
        if method.lower() not in folder_of and method not in folder_of.values():
            raise InvalidArgument(f"no method {method!r} there; {nearest(method, summary['methods'], 'the methods are')}")
        place = folder_of.get(method.lower(), method)
        inside = contents.inside(f"{RUNS}/{place}/seed-{summary['seed']}")
        return inside.folder, models.read_from(inside)
