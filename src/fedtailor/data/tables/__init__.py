"""Federations from tables (one row per example, a column that says whose it is) and from folders (one entry per client)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fedtailor.data.columns import columns_of, read_column
from fedtailor.data.federation import Federation
from fedtailor.data.tables.assembly import Source, build, check_known
from fedtailor.data.tables.folder import from_folder
from fedtailor.data.tables.options import Options
from fedtailor.data.tables.read import read_table
from fedtailor.data.words import row_number, shown
from fedtailor.errors import InvalidArgument

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Options", "from_folder", "from_table", "read_table"]


def from_table(data: pd.DataFrame | str | os.PathLike[str], client: str, label: str, options: Options) -> Federation:
    """See ``Federation.from_table``."""
    import pandas as pd

    recipe = None
    if isinstance(data, pd.DataFrame):
        table, name = columns_of(data), "table"
    elif isinstance(data, (str, os.PathLike)):
        path = Path(data)
        if path.is_dir():
            raise InvalidArgument(f"{str(path)!r} is a folder; use Federation.from_folder (without a client column)")
        table, name = columns_of(read_table(path)), path.name
        recipe = {"data": str(path.absolute()), "client": client, "label": label, **options.changed()}
    else:
        raise InvalidArgument(f"a table is a pandas DataFrame or a path, not {type(data).__name__}; use pandas.DataFrame(...)")
    if client == label:
        raise InvalidArgument(f"{shown(client)} is both the client and the label; name the column that says whose a row is")
    check_known(table, client, "client column")
    owner = read_column(client, table[client], "category", droppable=False)
    return build(Source(table, owner, None, row_number, options.name or name, recipe, client), label, options)
