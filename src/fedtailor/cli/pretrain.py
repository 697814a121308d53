"""``fedtailor pretrain``: weights to start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.base import print_text, progress, stoppable
from fedtailor.cli.flags import command_of
from fedtailor.cli.train import tell_about
from fedtailor.config import PretrainSettings

Out = Annotated[Path | None, typer.Option("--out", help="The file to write (default: MODEL-DATA.safetensors).")]


def register(app: typer.Typer) -> None:
    loose = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("pretrain", context_settings=loose)(command_of(PretrainSettings, pretrain, "DATA", pretrain.__doc__, Out))


def pretrain(settings: PretrainSettings, out: Path | None, as_json: bool, save: Path | None = None) -> None:
    """Train a whole network on public data and write its weights, for --backbone.

    The clients' rows are put together unless --method fedavg is given.
    """
    from fedtailor.engine.pretrain import pretrain as train
    from fedtailor.runs import files

    federation = settings.federation()
    tell_about(federation)
    if save:
        files.write(save, settings.toml())
    stem = Path(settings.data).name.split(".")[0].replace(":", "-") or "data"
    path = out or Path(f"{settings.model.replace(':', '-').replace(',', '-')}-{stem}.safetensors")
    with stoppable(lambda: "the same command goes on from here"), progress(settings.epochs) as callback:
        result = train(federation, settings.model, out=path, callback=callback, **settings.options().plain())
    metric = result.task.score
    score = result.summary[f"{metric.name}_global"]
    if as_json:
        typer.echo(json.dumps({"out": str(path), f"{metric.name}_global": score, "seconds": result.summary["seconds"]}, indent=2))
        return
    reached = f"{metric.words} on the clients' test rows {metric.cell(score)}"
    print_text(f"The weights are in {path}; {reached}. Start from them with --backbone {path}.")
