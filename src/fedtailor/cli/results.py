"""``report`` and ``export``: commands on a finished run, and how its models are opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
            more = {"failed": failures_of(where), "yardsticks": yardsticks_in(where)}
            page = write(records, to or where / "report.html", command=f"fedtailor report {where}", **more)
    print_text(json.dumps({"report": str(page), "best": best}, indent=2) if as_json else f"The report is in {page}.")


def export(
    where: Where,
    client: Client = None,
    method: Method = None,
    to: Annotated[Path, typer.Option(help="The .safetensors file to write; with --all, a directory.")] = Path(
        "model.safetensors"
    ),
    every: Annotated[bool, typer.Option("--all", help="One file per client.")] = False,
    as_json: Json = False,
) -> None:
    """Write a client's model (without --client: the shared one) as safetensors, with torch's names.

    With --all, index.json in the directory says which file is whose.
    """
    from fedtailor.cli.escape import file_names
    from fedtailor.runs import files
    from fedtailor.runs.contents import readable
    from fedtailor.runs.weights import pack

    saved = open_models(where, method)
    metadata = {k: str(saved.facts[k]) for k in ("algorithm", "model", "kind", "classes", "shape", "outputs")}
    file_of = {name: f"{file}.safetensors" for name, file in file_names(saved.clients).items()} if every else {}
    path_of: dict[str | None, Path] = {name: to / file for name, file in file_of.items()} if every else {client: to}
    for name, path in path_of.items():
        with readable(where):
            weights = saved.weights(name)
        files.write(path, pack(weights, {**metadata, "client": str(name)}))
    if every:
        files.write_json(to / "index.json", file_of)
    written = [str(path) for path in path_of.values()]
    print_text(json.dumps({"written": written}, indent=2) if as_json else f"{len(written)} written: {to}")


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
