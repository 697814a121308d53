"""``fedtailor advise``: should we learn together, how much, with what?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.base import say, show
from fedtailor.cli.flags import command_of
from fedtailor.cli.train import command_line, tell_about
from fedtailor.config import AdviseSettings
from fedtailor.errors import InvalidArgument

Out = Annotated[Path | None, typer.Option("--out", help="A directory for advice.json and report.html (default: none).")]


def register(app: typer.Typer) -> None:
    loose = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("advise", context_settings=loose)(command_of(AdviseSettings, advise, "DATA", advise.__doc__, Out))


def advise(settings: AdviseSettings, out: Path | None, as_json: bool, save: Path | None = None) -> None:
    """Say whether these clients should learn together, how much each should keep to itself, and with which method.

    It looks at training and validation rows only: one exchange of fitted parameters, then a short race of methods. With --out
    the advice is written to a directory as well: advice.json, and report.html with the pictures it rests on.
    """
    from fedtailor.advisor.advise import advise as ask
    from fedtailor.runs import files
    from fedtailor.runs.layout import HISTORY, SUMMARY

    if out and any((out / name).exists() for name in (HISTORY, SUMMARY)):
        raise InvalidArgument(f"{out} holds a run, whose report would be replaced; give another directory")
    federation = settings.federation()
    tell_about(federation)
    found = ask(federation, settings.model, **settings.options())
    if save:
        files.write(save, settings.toml())
    told = found.json()
    if out:
        told |= _pictured(settings, federation, found)
        say(f"the advice is in {out / 'advice.json'}, its page in {_keep(out, told)}")
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    typer.echo(found.text)
    show([], [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in found.race], False)


def _pictured(settings: AdviseSettings, federation: Any, found: Any) -> dict[str, Any]:
    """What the page needs beside the advice."""
    from fedtailor.advisor.curves import facts
    from fedtailor.version import __version__

    options = settings.options()
    about = {"data": Path(settings.data).name, "command": command_line()}
    seen = facts(
        federation, settings.model, found, **{name: options[name] for name in ("seed", "weights", "bias", "dtype", "backbone")}
    )
    return {**seen, "about": {**about, "version": __version__}}


def _keep(out: Path, told: dict[str, Any]) -> Path:
    """Write advice.json and the page; a sweep that lies there already is part of the page."""
    from fedtailor.report import advice
    from fedtailor.runs import files

    files.write_json(out / advice.ADVICE, told)
    kept, sweep = advice.read(out)
    return advice.write(kept, out / "report.html", sweep=sweep)
