"""Many files as one table: whose row each is, how a row is named in messages, columns end to end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtailor.data.columns import Raw
from fedtailor.data.words import Where

if TYPE_CHECKING:
    import pandas as pd


def category_column(categories: Sequence[str], sizes: Sequence[int]) -> Raw:
    """Return a column with a category for every row, from the category and the size of every piece."""
    number = {name: i for i, name in enumerate(dict.fromkeys(categories))}
    return Raw("category", np.repeat([number[name] for name in categories], sizes), tuple(number))


def row_locator(paths: Sequence[Path], sizes: Sequence[int]) -> Where:
    """Return a function that names a row in messages when the rows come from many files."""
    bounds = np.cumsum(sizes)

    def where(row: int) -> str:
        file = int(np.searchsorted(bounds, row, "right"))
        return f"row {row - int(bounds[file]) + sizes[file] + 1} of {parent_and_name(paths[file])!r}"

    return where


def parent_and_name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def concatenated(pieces: Sequence[pd.Series[Any]]) -> pd.Series[Any]:
    """Join a column of many files; where their types differ, each cell keeps its own."""
    import pandas as pd
    from pandas.api import types

    kinds = {piece.dtype for piece in pieces}
    if len(kinds) == 1:
        return pd.concat(pieces, ignore_index=True)
    if all(types.is_numeric_dtype(kind) and not types.is_bool_dtype(kind) for kind in kinds):
        return pd.Series(np.concatenate([piece.to_numpy(np.float64, na_value=np.nan) for piece in pieces]))
    # a file whose cells are all empty does not tell the type
    return pd.Series(np.concatenate([piece.astype(object).to_numpy() for piece in pieces]), dtype=object)
