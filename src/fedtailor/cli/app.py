"""The application: every command in its place."""

from __future__ import annotations

from typing import Annotated

import typer

from fedtailor.cli import advise, explain, laws, onboard, predict, pretrain, results, sweep, train, trust
from fedtailor.cli.base import Group
from fedtailor.cli.data import data
from fedtailor.cli.lists import lists
from fedtailor.cli.papers import papers
from fedtailor.cli.sites import sites
from fedtailor.version import __version__

app = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedtailor {__version__}")
        raise typer.Exit


@app.callback()
def start(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Personalised federated learning: train it, compare the methods, see who gains."""


train.register(app)
pretrain.register(app)
advise.register(app)
sweep.register(app)
of_runs = (train.resume, results.report, predict.predict, onboard.onboard, explain.explain, results.export)
for command in (*of_runs, trust.key, trust.sign, trust.verify, laws.check):
    app.command()(command)
app.add_typer(data, name="data")
app.add_typer(lists, name="list")
app.add_typer(sites, name="sites")
app.add_typer(papers, name="papers")


def main() -> None:
    app()
