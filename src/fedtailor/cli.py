"""The command line. Torch is imported by the commands that need it, never for ``--help``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedtailor import __version__
from fedtailor.errors import FedtailorError, InvalidArgument

WIDTH = 100  # columns of a table where the terminal does not say
DIGITS = (8, 8), 10  # the input and the number of classes that models are counted for


class Group(TyperGroup):
    """Commands whose refusals are one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FedtailorError as error:
            if ctx.params["debug"]:
                raise
            typer.echo(f"fedtailor: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
lists = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What there is: algorithms, models, data.")
app.add_typer(lists, name="list")

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedtailor {__version__}")
        raise typer.Exit


@app.callback()
def start(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Personalised federated learning."""


@lists.command("algorithms")
def list_algorithms(as_json: Json = False) -> None:
    """The methods and their facts, found by running each on a small network.

    Down, up and kept count models; trained counts parameters.
    """
    from fedtailor.advisor import cards

    found = cards()
    show([c.row() for c in found], [c.cells() for c in found], as_json)


@lists.command("models")
def list_models(as_json: Json = False) -> None:
    """The networks by name; parameters are for 8x8 images and 10 classes."""
    from fedtailor import models

    rows = [describe(name) for name in models.names()]
    show(rows, [{**row, "groups": ", ".join(row["groups"])} for row in rows], as_json)


def describe(name: str) -> dict[str, Any]:
    """A network's facts on the digits; ``note`` says why there are none for one that is not made for them."""
    from fedtailor import models, tree
    from fedtailor.task import Task

    try:
        task = Task.from_module(models.build(name, *DIGITS))
    except FedtailorError as error:
        return {"name": name, "parameters": None, "groups": [], "note": str(error)}
    groups = [group for group, members in task.groups.items() if members]
    return {"name": name, "parameters": tree.size(tree.trainable(task.init())), "groups": groups, "note": ""}


@lists.command("data")
def list_data(as_json: Json = False) -> None:
    """The federations by name, with their options."""
    import inspect

    from fedtailor.data.sources import SOURCES

    rows: list[dict[str, Any]] = []
    for name, source in SOURCES.items():
        options = {key: parameter.default for key, parameter in inspect.signature(source).parameters.items()}
        rows.append({"name": name, "about": " ".join((source.__doc__ or "").split()), "options": options})
    cells = [{**row, "options": ", ".join(f"{k}={v}" for k, v in row["options"].items())} for row in rows]
    show(rows, cells, as_json)


@app.command()
def check(
    where: Annotated[str, typer.Argument(metavar="PATH:CLASS", help="A method in a file, as in mine.py:MyMethod.")],
    as_json: Json = False,
) -> None:
    """Try the ten laws on a method of your own, with its default settings."""
    from fedtailor.laws import check_algorithm

    kept = check_algorithm(load(where)())
    rows = [{"law": verdict.number, "title": verdict.law, "model": verdict.model} for verdict in kept]
    show(rows, rows, as_json)


def load(where: str) -> Any:
    """The class named by ``PATH:CLASS``."""
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    path, _, name = where.rpartition(":")
    if not name.isidentifier() or not path.endswith(".py") or not Path(path).is_file():
        raise InvalidArgument(f"cannot read {where!r}; give a Python file and a class in it, as in mine.py:MyMethod")
    spec = spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # a dataclass looks its module up by name
    spec.loader.exec_module(module)
    if not isinstance(getattr(module, name, None), type):
        raise InvalidArgument(f"{path} has no class {name!r}")
    return getattr(module, name)


def show(rows: Sequence[Any], cells: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Rows as one JSON document, or their cells as a table."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for i, (title, value) in enumerate(cells[0].items()):
        table.add_column(title, no_wrap=i == 0, justify="right" if isinstance(value, int) else "left")
    for row in cells:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    console.print(table)


def main() -> None:
    app()
