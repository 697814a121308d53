"""``fedtailor sweep``: what a stronger pull to the shared model buys, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.base import print_text, progress, say, show
from fedtailor.cli.flags import command_of
from fedtailor.cli.train import tell_about
from fedtailor.config import SweepSettings
from fedtailor.errors import InvalidArgument

Out = Annotated[Path | None, typer.Option("--out", help="A directory for sweep.json (default: none).")]


def register(app: typer.Typer) -> None:
    loose = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("sweep", context_settings=loose)(command_of(SweepSettings, sweep, "DATA", sweep.__doc__, Out))


def sweep(settings: SweepSettings, out: Path | None, as_json: bool, save: Path | None = None) -> None:
    """Trade accuracy against communication: FedCLUP with lam from local to global, on validation rows.

    Every lam is begun from scratch for a few rounds and its end found from its neighbour's, so ten cost less than four runs. With
    --out the result is written to DIR/sweep.json as well.
    """
    from fedtailor.advisor.sweep import sweep as run_sweep
    from fedtailor.advisor.sweep import total
    from fedtailor.algorithms.fedclup import FedCLUP
    from fedtailor.algorithms.settings import find
    from fedtailor.runs import files

    if find(settings.method) is not FedCLUP:
        raise InvalidArgument(
            f"{settings.method} cannot be swept: its ends are found by going on from a neighbouring lam, which is derived for "
            f"FedCLUP only; use compare --methods {settings.method} --tune --grid lam=0.01,0.1,1"
        )
    federation = settings.federation()
    tell_about(federation)
    with progress(total(settings.rounds, settings.lams, settings.dynamic)) as callback:
        result = run_sweep(federation, settings.model, callback=callback, **settings.options().plain())
    if save:
        files.write(save, settings.toml())
    if out:
        files.write_json(out / "sweep.json", result.json())
        say(f"the sweep is in {out / 'sweep.json'}")
    if as_json:
        typer.echo(json.dumps(result.json(), indent=2, allow_nan=False))
        return
    print_text(result.text)
    show([], [{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in result.table()], False)
