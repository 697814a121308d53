"""``fedtailor advise``: should we learn together, how much, with what?"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from fedtailor.cli.base import say, show
from fedtailor.cli.flags import command_of
from fedtailor.cli.train import tell_about
from fedtailor.config import AdviseSettings


def register(app: typer.Typer) -> None:
    loose = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("advise", context_settings=loose)(command_of(AdviseSettings, advise, "DATA", advise.__doc__))


def advise(settings: AdviseSettings, out: Path | None, as_json: bool, save: Path | None = None) -> None:
    """Say whether these clients should learn together, how much each should keep to itself, and with which method.

    It looks at training and validation rows only: one exchange of fitted parameters, then a short race of methods. With --out
    the advice is written to a directory as well.
    """
    from fedtailor.advisor.advise import advise as ask
    from fedtailor.runs import files

    federation = settings.federation()
    tell_about(federation)
    found = ask(federation, settings.model, **settings.options())
    if save:
        files.write(save, settings.toml())
    if out:
        files.write_json(out / "advice.json", found.json())
        say(f"the advice is in {out / 'advice.json'}")
    if as_json:
        typer.echo(json.dumps(found.json(), indent=2))
        return
    typer.echo(found.text)
    show([], [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in found.race], False)
