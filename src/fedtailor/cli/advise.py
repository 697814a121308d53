"""``fedtailor advise``: should we learn together, how much, with what?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.base import print_text, say, show
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
    advice = ask(federation, settings.model, **settings.options().plain())
    if save:
        files.write(save, settings.toml())
    values = advice.json()
    if out:
        values |= _page_facts(settings, federation, advice)
        say(f"the advice is in {out / 'advice.json'}, its page in {_write(out, values)}")
    if as_json:
        typer.echo(json.dumps(values, indent=2))
        return
    print_text(advice.text)
    show([], [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in advice.race], False)


def _page_facts(settings: AdviseSettings, federation: Any, advice: Any) -> dict[str, Any]:
    """Return what the page shows beside the advice: its curves, and where it comes from."""
    from fedtailor.advisor.curves import facts
    from fedtailor.version import __version__

    about = {"data": Path(settings.data).name, "command": command_line(), "version": __version__}
    return {**facts(federation, settings.model, advice, settings.options()), "about": about}


def _write(out: Path, values: dict[str, Any]) -> Path:
    """Write advice.json and the page, and return the page's path; a sweep that is there already is shown on it."""
    from fedtailor.report import advice
    from fedtailor.runs import files

    files.write_json(out / advice.ADVICE, values)
    written, sweep = advice.read(out)
    return advice.write(written, out / "report.html", sweep=sweep)
