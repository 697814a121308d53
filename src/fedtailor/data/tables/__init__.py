"""Federations from tables (one row per example, a column that says whose it is) and from folders (one entry per client)."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor.data.columns import columns_of, read_column
from fedtailor.data.federation import Federation
from fedtailor.data.keywords import keywords_of
from fedtailor.data.refit import Parts, refittable
from fedtailor.data.tables.assembly import Source, build, check_known, unmarked
from fedtailor.data.tables.folder import from_folder
from fedtailor.data.tables.options import TableOptions
from fedtailor.data.tables.read import read_table
from fedtailor.data.words import row_number, shown
from fedtailor.errors import InvalidArgument

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TableOptions", "from_folder", "from_table", "read_table"]


@keywords_of(TableOptions)
def from_table(source: pd.DataFrame | str | os.PathLike[str], *, client: str, label: str, **options: Any) -> Federation:
    """Read a DataFrame or a .csv, .tsv (plain or .gz) or .parquet file with a row per example; ``client`` names the column
    that says whose it is.

    Numbers stay numbers, text becomes one feature per category of the training rows, dates become days; ``notes`` says
    what was assumed and ``schema`` reads new rows the same way. Every client's rows are split at random, class by class,
    unless the column ``split`` says train, val or test. ``missing`` is ``fill``, ``drop`` (the rows) or ``refuse``;
    ``standardize`` is ``pooled``, ``client`` or ``none``; clients with fewer than ``min_samples`` rows are left out.

    Clients and classes are called as they are written, and only an empty cell is a missing one; ``merge_clients`` and
    ``merge_labels`` make one of those that look alike. In the other columns words such as NA are missing too, unless
    ``keep_na``. Cells that hold a mark of ``na`` are missing in all columns. ``columns`` is a file that says how each column
    is read (``fedtailor data describe --save-columns``); nothing is then learnt from the rows. ``row_weights`` names a column
    that says how much each training row counts in the loss (2 is the row twice); measures count all rows alike.
    """
    return refittable(partial(_read, source, client, label, TableOptions(**options)))


def _read(
    source: Any, client: str, label: str, chosen: TableOptions, fit_to: frozenset[str] | None, parts: Parts | None
) -> Federation:
    """Read a table; its columns are fitted to the training rows of the clients ``fit_to``, or of all. ``parts`` says how its rows
    are split, where that is drawn elsewhere."""
    import pandas as pd

    recipe = None
    if isinstance(source, pd.DataFrame):
        table, name = columns_of(source), "table"
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.is_dir():
            raise InvalidArgument(f"{str(path)!r} is a folder; use Federation.from_folder (without a client column)")
        table, name = columns_of(read_table(path, (client, label))), path.name
        recipe = {"data": str(path.absolute()), "client": client, "label": label, **chosen.changed()}
    else:
        raise InvalidArgument(f"a table is a pandas DataFrame or a path, not {type(source).__name__}; use pandas.DataFrame(...)")
    if client == label:
        raise InvalidArgument(f"{shown(client)} is both the client and the label; name the column that says whose a row is")
    check_known(table, client, "client column")
    table, marked = unmarked(table, {client, label, chosen.split, chosen.row_weights}, chosen)
    owner = read_column(client, table[client], "category", droppable=False)
    return build(Source(table, owner, parts, row_number, chosen.name or name, recipe, client, marked), label, chosen, fit_to)
