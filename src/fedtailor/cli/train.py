"""``run``, ``compare`` and ``resume``. Their flags are the settings of ``fedtailor.config``, one by one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.base import Json, print_text, progress, say, show, stoppable
from fedtailor.cli.flags import command_of
from fedtailor.config import CompareSettings, RunSettings, Settings, assignments, join
from fedtailor.errors import InvalidArgument

FORMS = {  # the table of a comparison as a paper wants it, on stdout
    form: Annotated[bool, typer.Option(f"--{form}", help=f"Print the table as {name}: mean ± deviation, best in bold, marks.")]
    for form, name in {"latex": "LaTeX", "csv": "CSV", "markdown": "Markdown"}.items()
}


def register(app: typer.Typer) -> None:
    """Add ``run`` and ``compare``, their signatures made from the settings."""
    loose = {"allow_extra_args": True, "ignore_unknown_options": True}  # a method's settings are flags too: --lam 0.5
    app.command("run", context_settings=loose)(command_of(RunSettings, run, "[METHOD] DATA", run.__doc__))
    app.command("compare", context_settings=loose)(command_of(CompareSettings, compare, "DATA", compare.__doc__, more=FORMS))


def run(settings: RunSettings, out: Path | None, as_json: bool, save: Path | None = None, resuming: bool = False) -> None:
    """Train one method and measure it.

    DATA is a name (digits), a table (patients.csv, with --client and --label) or a folder. The method's settings are flags as
    well: --lam 0.5 --lr 0.1 --epochs 2.
    """
    algorithm, federation = settings.algorithm(), settings.federation()
    tell_about(federation)
    save_settings(settings, save)
    from fedtailor.engine.run import run as train
    from fedtailor.report.evidence import Evidence
    from fedtailor.report.page import write
    from fedtailor.report.words import threshold_words

    folder = out or new_folder(settings.data, settings.method)
    with resumable(folder):
        with progress(settings.rounds) as callback:
            options = settings.options()
            result = train(algorithm, federation, settings.model, options, out=folder, resume=resuming, callback=callback)
        evidence = Evidence({result.summary["algorithm"]: [result.record()]})
        page = write(
            evidence.results, folder / "report.html", command=command_line(), explained=_explained(folder, result.federation)
        )
    tell_notes(result.summary["notes"], federation)
    if as_json:
        typer.echo(json.dumps({**result.summary, "verdict": evidence.verdict.json(), "out": str(folder)}, indent=2))
        return
    show([], [_cells(result.summary["settings"], result.summary, [result.summary])], False)
    tell_privacy({result.summary["algorithm"]: result.summary})
    for line in (evidence.verdict.sentence, threshold_words(evidence)):
        if line:
            print_text(line)
    print_text(f"The run is in {folder}, the report in {page}.")


def _explained(folder: Path, federation: Any) -> Any:
    """Return what the report says of a finished run's models; nothing where they cannot be read without Python."""
    from fedtailor.engine.explain import for_report
    from fedtailor.errors import BadRun
    from fedtailor.runs import models

    try:
        return for_report(models.read(folder), federation)
    except BadRun:
        return None, []


def compare(
    settings: CompareSettings,
    out: Path | None,
    as_json: bool,
    save: Path | None = None,
    resuming: bool = False,
    **forms: bool | None,
) -> None:
    """Compare methods on the same splits and seeds, and write a report: who gains by learning together?

    DATA is a name (digits), a table (patients.csv, with --client and --label) or a folder.
    """

    form = _form(as_json, forms)
    algorithms, federation = settings.algorithms(), settings.federation()
    tell_about(federation)
    if settings.splits != 1 and settings.split is not None:
        raise InvalidArgument("the column of --split says which rows test, and --splits draws them; give one of the two")
    if settings.grid and not settings.tune:
        say("the grid is not used; add --tune to choose from it")
    save_settings(settings, save)
    from fedtailor.engine.compare import compare as train
    from fedtailor.engine.compare import total
    from fedtailor.report.evidence import Evidence
    from fedtailor.report.page import write

    folder = out or new_folder(settings.data, "compare")
    grid = settings.grid if settings.tune and settings.grid else settings.tune
    with resumable(folder):
        with progress(total(algorithms, settings.rounds, settings.seeds, grid, settings.splits)) as callback:
            comparison = train(
                algorithms,
                federation,
                settings.model,
                settings.options(),
                seeds=settings.seeds,
                splits=settings.splits,
                yardsticks=settings.yardsticks,
                tune=grid,
                out=folder,
                resume=resuming,
                callback=callback,
            )
        evidence = Evidence(comparison.records(), comparison.failed, comparison.yardsticks)
        more = {"failed": comparison.failed, "yardsticks": comparison.yardsticks}
        page = write(evidence.results, folder / "report.html", command=command_line(), **more)
    tell_notes(next(iter(comparison.values())).summary["notes"], federation)
    if as_json:
        print_text(json.dumps({**_comparison_facts(comparison, evidence), "out": str(folder)}, indent=2))
    elif form is not None:
        from fedtailor.report.tables import table

        print_text(table(evidence, form).rstrip("\n"))
    else:
        _show_comparison(comparison, evidence)
        print_text(f"The report is in {page}.")
    if comparison.failed:
        raise typer.Exit(1)


def _form(as_json: bool, forms: Mapping[str, bool | None]) -> Any:
    """The form of the table that was asked for, if one was."""
    asked = [form for form, wanted in forms.items() if wanted]
    if len(asked) + as_json > 1:
        raise InvalidArgument(
            f"stdout has room for one of {', '.join(f'--{form}' for form in (*FORMS, 'json'))}; give one of them"
        )
    return asked[0] if asked else None


def _comparison_facts(comparison: Any, evidence: Any) -> dict[str, Any]:
    """Return what ``compare --json`` prints."""
    yardsticks = [{"yardstick": label, **records[0].summary} for label, records in comparison.yardsticks.items()]
    if len(evidence.splits) > 1:
        key = f"{evidence.name}_personal"
        yardsticks = [{**row, key: evidence.average(row["yardstick"], key).mean} for row in yardsticks]
    return {
        "best": evidence.best,
        "verdict": evidence.verdict.json(),
        "not_told_from_best": evidence.alike,
        "methods": comparison.table(),
        "yardsticks": yardsticks,
        "failed": comparison.failed,
        "tuning": comparison.tuning,
    }


def _show_comparison(comparison: Any, evidence: Any) -> None:
    """Print the table, the verdict and what goes with it."""
    from fedtailor.report.page import terminal_rows
    from fedtailor.report.privacy import worst_of
    from fedtailor.report.words import chosen, held_against, threshold_words

    show([], terminal_rows(evidence), False)
    for label, reason in comparison.failed.items():
        print_text(f"{label} failed: {reason}")
    tell_privacy({label: worst_of(comparison.summaries(label)) for label in comparison})
    for line in (evidence.verdict.sentence, chosen(evidence), held_against(evidence), threshold_words(evidence)):
        if line:
            print_text(line)


def tell_privacy(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Print what private runs protect, and what they do not."""
    from fedtailor.report.privacy import not_counted, story

    for line in story(summaries):
        print_text(f"{line}.")
    for line in not_counted(list(summaries.values())):
        print_text(f"Not counted: {line}.")


def resume(
    where: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run or a comparison that was stopped.")],
    workers: Annotated[int | None, typer.Option(help="Processes of the loop engine.", min=1)] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute from here on: cpu, cuda, cuda:N, mps or auto.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Go on until there are this many rounds, also after the end.", min=1)] = None,
    add: Annotated[str | None, typer.Option(help="Methods to add to a comparison, separated by commas.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Settings of methods that are added, as ditto.lam=0.5.", metavar="NAME=VALUE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Go on with a run or a comparison that was stopped; it ends as if it never had been.

    A finished one is read back, unless it is given more: --rounds, or in a comparison --add.
    """
    from fedtailor.algorithms.origin import function_of, pieces_of, refuse_inside
    from fedtailor.algorithms.settings import recall
    from fedtailor.runs.contents import open_contents, readable
    from fedtailor.runs.layout import SUMMARY

    settings = dict(open_contents(where).config)
    if "data" not in settings or "model" not in settings:
        reason = "a federation that no command makes" if "data" not in settings else "a module of one's own"
        raise InvalidArgument(f"{where} was begun in Python, with {reason}; go on there, with ft.run(..., out=..., resume=True)")
    with readable(where):
        for method in [settings] if "method" in settings else settings["set"].values():
            recall(method["method"], where)  # refused here unless it is the class that the run was made with
        refuse_inside(settings, where)
        for piece in pieces_of(settings):
            function_of(piece, where)  # refused here if it has changed
    if workers is not None:
        settings["workers"] = workers
    if device is not None:
        settings["device"] = device
    if rounds is not None:
        settings["rounds"] = rounds
    if add is not None or set_:
        settings = _with_methods(settings, add, set_ or [], where)
    # what is finished is read back, so that whatever fails is a file that does not fit the others
    code = 0
    with readable(where) if any(where.rglob(SUMMARY)) else nullcontext():
        try:
            if settings.get("command") == "compare":
                compare(CompareSettings.of(settings, f"{where}: "), where, as_json, resuming=True)
            else:
                run(RunSettings.of(settings, f"{where}: "), where, as_json, resuming=True)
        except typer.Exit as end:
            code = end.exit_code
    raise typer.Exit(code)


def _with_methods(settings: dict[str, Any], add: str | None, assigned: Sequence[str], where: Path) -> dict[str, Any]:
    """The settings of a comparison with more methods."""
    if settings.get("command") != "compare" or add is None:
        why = "--set is for methods that --add adds" if add is None else f"{where} is a run, to which no method can be added"
        raise InvalidArgument(f"{why}; compare them in a new directory, or give --add")
    names = [name.strip() for name in add.split(",") if name.strip()]
    own = assignments(assigned, "--set")
    if loose := [key for key, value in own.items() if not isinstance(value, dict)]:
        raise InvalidArgument(f"--set {loose[0]} does not say whose; write it as {names[0]}.{loose[0]}=...")
    return {**settings, "methods": [*settings["methods"], *names], "set": join(settings["set"], own)}


def new_folder(data: str, method: str) -> Path:
    """A run directory that does not exist yet, named after the data and the method."""
    stem = Path(data).name.split(".")[0].replace(":", "-") or "run"
    base = Path("runs") / f"{stem}-{method}"
    return next(p for p in (base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 10_000))) if not p.exists())


def save_settings(settings: Settings, path: Path | None) -> None:
    """Write the settings to a file, if one is given."""
    from fedtailor.runs import files

    if path is not None:
        files.write(path, settings.toml())


def tell_about(federation: Any) -> None:
    """Write to stderr what was assumed about the data."""
    for note in federation.notes:
        say(note)


def tell_notes(notes: Sequence[str], federation: Any) -> None:
    """Write the notes to stderr that are not about the data."""
    for note in notes:
        if note not in federation.notes:
            say(note)


def resumable(folder: Path) -> AbstractContextManager[None]:
    """A context in which a signal that stops the command says how to resume the run in ``folder``."""
    from fedtailor.runs.layout import CONFIG

    begun = folder / CONFIG
    return stoppable(lambda: f"go on with: fedtailor resume {folder}" if begun.exists() else "give the same command again")


def _cells(label: str, summary: Mapping[str, Any], summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    from fedtailor.report.evidence import score_of
    from fedtailor.report.page import cell, columns

    shown = columns(score_of(summaries[0]).name, summaries)
    return {"method": label, **{title: cell(key, summary.get(key)) for key, title in shown.items()}}


def command_line() -> str:
    import shlex

    return shlex.join(["fedtailor", *sys.argv[1:]])
