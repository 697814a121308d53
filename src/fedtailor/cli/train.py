"""``run``, ``compare`` and ``resume``. Their flags are the settings of ``fedtailor.config``, one by one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.base import Json, progress, say, show
from fedtailor.cli.flags import command_of
from fedtailor.config import CompareSettings, RunSettings, Settings
from fedtailor.errors import InvalidArgument


def register(app: typer.Typer) -> None:
    """Add ``run`` and ``compare``, their signatures made from the settings."""
    loose = {"allow_extra_args": True, "ignore_unknown_options": True}  # a method's settings are flags too: --lam 0.5
    app.command("run", context_settings=loose)(command_of(RunSettings, run, "[METHOD] DATA", run.__doc__))
    app.command("compare", context_settings=loose)(command_of(CompareSettings, compare, "DATA", compare.__doc__))


def run(settings: RunSettings, out: Path | None, as_json: bool, save: Path | None = None, resuming: bool = False) -> None:
    """Train one method and measure it.

    DATA is a name (digits), a table (patients.csv, with --client and --label) or a folder. The method's settings are flags as
    well: --lam 0.5 --lr 0.1 --epochs 2.
    """
    algorithm, federation = settings.algorithm(), settings.federation()
    tell_about(federation)
    keep(settings, save)
    from fedtailor.engine.run import run as train
    from fedtailor.report.page import write

    folder = out or fresh(settings.data, settings.method)
    with resumable(folder), progress(settings.rounds) as tell:
        done = train(algorithm, federation, settings.model, out=folder, resume=resuming, callback=tell, **settings.options())
    tell_notes(done.summary["notes"], federation)
    page = write({done.summary["algorithm"]: [done.record()]}, folder / "report.html", command=command_line())
    if as_json:
        typer.echo(json.dumps({**done.summary, "out": str(folder)}, indent=2))
        return
    show([], [_cells(done.summary["settings"], done.summary, [done.summary])], False)
    typer.echo(f"The run is in {folder}, the report in {page}.")


def compare(settings: CompareSettings, out: Path | None, as_json: bool, save: Path | None = None, resuming: bool = False) -> None:
    """Compare methods on the same splits and seeds, and write a report: who gains by learning together?

    DATA is a name (digits), a table (patients.csv, with --client and --label) or a folder.
    """
    from fedtailor.local import Private

    algorithms, federation = settings.algorithms(), settings.federation()
    tell_about(federation)
    if settings.grid and not settings.tune:
        say("the grid is not used; add --tune to choose from it")
    if settings.tune and any(isinstance(a.opt, Private) for a in algorithms.values()):
        say("epsilon is that of the runs shown; the trials of --tune see the same rows and are not counted")
    keep(settings, save)
    from fedtailor.engine.compare import compare as train
    from fedtailor.engine.compare import total
    from fedtailor.report.page import headline, write

    folder = out or fresh(settings.data, "compare")
    grid = settings.grid if settings.tune and settings.grid else settings.tune
    with resumable(folder), progress(total(algorithms, settings.rounds, settings.seeds, grid)) as tell:
        found = train(
            algorithms,
            federation,
            settings.model,
            seeds=settings.seeds,
            tune=grid,
            out=folder,
            resume=resuming,
            callback=tell,
            **settings.options(),
        )
    tell_notes(next(iter(found.values())).summary["notes"], federation)
    records = found.records()
    page = write(records, folder / "report.html", command=command_line())
    best = headline(records)
    rows = found.table()
    if as_json:
        typer.echo(json.dumps({"best": best["best"], "methods": rows, "tuning": found.tuning, "out": str(folder)}, indent=2))
        return
    show([], [_cells(row["method"], row, rows) for row in rows], False)
    chosen = f"Best on validation: {best['best']}" if best["best"] else "There are no validation rows to choose a method on"
    typer.echo(f"{chosen}. The report is in {page}.")


def resume(
    where: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run or a comparison that was stopped.")],
    workers: Annotated[int | None, typer.Option(help="Processes of the loop engine.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Go on with a run or a comparison that was stopped; it ends as if it never had been."""
    from fedtailor.runs.folder import readable
    from fedtailor.runs.layout import SUMMARY, check_version

    asked = check_version(where)
    if "data" not in asked or "model" not in asked:
        raise InvalidArgument(f"{where} was begun in Python, with objects; go on there, with ft.run(..., out=..., resume=True)")
    if workers is not None:
        asked["workers"] = workers
    # what is finished is read back, so that whatever fails is a file that does not fit the others
    with readable(where) if any(where.rglob(SUMMARY)) else nullcontext():
        if asked.get("command") == "compare":
            compare(CompareSettings.of(asked, f"{where}: "), where, as_json, resuming=True)
        else:
            run(RunSettings.of(asked, f"{where}: "), where, as_json, resuming=True)


def fresh(data: str, what: str) -> Path:
    """A run directory that is not there yet, named after the data and the method."""
    stem = Path(data).name.split(".")[0].replace(":", "-") or "run"
    base = Path("runs") / f"{stem}-{what}"
    return next(p for p in (base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 10_000))) if not p.exists())


def keep(settings: Settings, path: Path | None) -> None:
    """Write the settings to a file, if one is given."""
    from fedtailor.runs import files

    if path is not None:
        files.write(path, settings.toml())


def tell_about(federation: Any) -> None:
    """What was assumed about the data, on stderr."""
    for note in federation.notes:
        say(note)


def tell_notes(notes: Sequence[str], federation: Any) -> None:
    """What was found out about the model, on stderr."""
    for note in notes:
        if note not in federation.notes:
            say(note)


class resumable:  # noqa: N801 (used like a function)
    """Ctrl-C says how to go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is KeyboardInterrupt:
            from fedtailor.runs.layout import CONFIG

            begun = (self.folder / CONFIG).exists()
            say(f"stopped; go on with: fedtailor resume {self.folder}" if begun else "stopped before the first round")
            raise typer.Exit(130) from None


def _cells(label: str, summary: Mapping[str, Any], every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    from fedtailor.metrics.client import score_name
    from fedtailor.report.page import cell, columns

    shown = columns(score_name(summary["kind"]), every)
    return {"method": label, **{title: cell(key, summary.get(key)) for key, title in shown.items()}}


def command_line() -> str:
    import shlex

    return shlex.join(["fedtailor", *sys.argv[1:]])
