"""``onboard``: a model for a client that was not there when the run was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.base import Json, print_text, say
from fedtailor.cli.results import Method, Where, open_run
from fedtailor.errors import ModelMismatch


def onboard(
    where: Where,
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="Labelled rows of the new client: a .csv or .parquet file.")],
    client: Annotated[str | None, typer.Option(help="The new client's name (default: the one in the table).")] = None,
    method: Method = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds it works for (default: as many as the run's clients).")] = None,
    as_json: Json = False,
) -> None:
    """Make a model for a new client from a few labelled rows, and say whether it is better than the shared one.

    The client works by the run's own method on what the others have learnt; nothing they have changes. Every row is judged by a
    model that has not seen it. Afterwards predict knows the client by its name.
    """
    from fedtailor.data.tables import read_table
    from fedtailor.data.tables.newcomer import client_of, read_newcomer
    from fedtailor.engine.onboard import onboard as work
    from fedtailor.runs import onboarded
    from fedtailor.runs.contents import readable

    folder, saved = open_run(where, method)
    schema = saved.schema
    if schema is None:
        raise ModelMismatch(
            "the run was not made from a table; in Python: ft.onboard(fedtailor.runs.models.read(RUN), x, y, NAME)"
        )
    table = read_table(rows, (schema.client, schema.label))
    name, table = client_of(schema, table, client)
    with readable(where):
        x, y, notes = read_newcomer(schema, table, bool(saved.config.get("merge_labels")))
    for note in notes:
        say(note)
    new = work(saved, x, y, name, rounds)
    path = onboarded.write(folder, name, onboarded.Newcomer(new.personal, new.moments, new.record), saved.facts["sha256"])
    if as_json:
        print_text(json.dumps({**new.record, "written": str(path)}, indent=2))
        return
    print_text(new.record["text"])
    print_text(f"Its model is kept: fedtailor predict {where} NEW.csv --client {name}")
