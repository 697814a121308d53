"""``explain``: which columns the clients' models rest on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.base import Json, print_text
from fedtailor.cli.own_data import own_federation
from fedtailor.cli.results import Client, Method, Where, open_run


def explain(
    where: Where,
    rows: Annotated[Path | None, typer.Argument(metavar="TABLE", help="The run's own table, if it was moved.")] = None,
    client: Client = None,
    method: Method = None,
    to: Annotated[Path | None, typer.Option(help="The page to write (default: explain.html in the directory).")] = None,
    as_json: Json = False,
) -> None:
    """Say which columns each client's model rests on, and where it differs from the shared model, with intervals.

    Importance is how much the loss on test rows grows when a column's values are dealt out anew among a client's rows.
    """
    from fedtailor.engine.explain import explain as work
    from fedtailor.engine.explain import in_words
    from fedtailor.report.explained import page
    from fedtailor.runs import files

    folder, saved = open_run(where, method)
    _, federation, _ = own_federation(folder, saved, rows)
    explained = work(saved, federation, client)
    lines = in_words(explained)
    path = to or where / "explain.html"
    files.write(path, page(explained, lines))
    if as_json:
        print_text(json.dumps({**explained, "page": str(path)}, indent=2))
        return
    print_text("By how much the loss on test rows grows when a column is dealt out anew among a client's rows (95 % interval):")
    for line in lines:
        print_text(line)
    print_text(f"The picture is in {path}.")
