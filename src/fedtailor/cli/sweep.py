"""``fedtailor sweep``: what a stronger pull to the shared model buys, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.base import print_text, progress, say, show
from fedtailor.cli.flags import command_of
from fedtailor.cli.train import command_line, tell_about
from fedtailor.config import SweepSettings

Out = Annotated[Path | None, typer.Option("--out", help="A directory for sweep.json and report.html (default: none).")]


def register(app: typer.Typer) -> None:
    loose = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("sweep", context_settings=loose)(command_of(SweepSettings, sweep, "DATA", sweep.__doc__, Out))


def sweep(settings: SweepSettings, out: Path | None, as_json: bool, save: Path | None = None) -> None:
    """Trade accuracy against communication: a method with lam from local to global, on validation rows.

    Every lam of FedCLUP is begun from scratch for a few rounds and its end found from its neighbour's, so ten cost less than four
    runs. Another --method that has a lam, also one of your own, is played in full for every lam. With --out the
    result is written to DIR/sweep.json as well, and DIR/report.html shows it.
    """
    from fedtailor.advisor.sweep import sweep as run_sweep
    from fedtailor.advisor.sweep import total
    from fedtailor.errors import InvalidArgument
    from fedtailor.runs import files
    from fedtailor.runs.layout import HISTORY, SUMMARY

    options = settings.options()
    most = total(options, settings.method)  # refused before the data are read
    if out and any((out / name).exists() for name in (HISTORY, SUMMARY)):
        raise InvalidArgument(f"{out} holds a run, whose report would be replaced; give another directory")
    federation = settings.federation()
    tell_about(federation)
    with progress(most) as callback:
        result = run_sweep(federation, settings.model, method=settings.method, callback=callback, **options.plain())
    if save:
        files.write(save, settings.toml())
    if out:
        files.write_json(out / "sweep.json", result.json())
        written = _write(out, result.json())
        say(f"the sweep is in {out / 'sweep.json'}, its page in {written}")
    if as_json:
        typer.echo(json.dumps(result.json(), indent=2, allow_nan=False))
        return
    print_text(result.text)
    show([], [{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in result.table()], False)


def _write(out: Path, values: dict[str, Any]) -> Path:
    """Write the page and return its path; beside an advice, it is the advice's page that shows the sweep as well."""
    from fedtailor.report import advice
    from fedtailor.report.sweep import write

    if (out / advice.ADVICE).exists():
        advised, swept = advice.read(out)
        return advice.write(advised, out / "report.html", sweep=swept)
    return write(values, out / "report.html", command_line())
