"""Many files as one table: whose the rows are, how a row is called, columns end to end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtailor.data.columns import Raw
from fedtailor.data.words import Where

if TYPE_CHECKING:
    import pandas as pd


def owner_of(clients: Sequence[str], sizes: Sequence[int]) -> Raw:
    """Whose every row is, from the client and size of every piece."""
    number = {who: i for i, who in enumerate(dict.fromkeys(clients))}
    return Raw("category", np.repeat([number[who] for who in clients], sizes), tuple(number))


def rows_of(paths: Sequence[Path], sizes: Sequence[int]) -> Where:
    """How to speak of a row when the rows come from many files."""
    bounds = np.cumsum(sizes)

    def where(row: int) -> str:
        file = int(np.searchsorted(bounds, row, "right"))
        return f"row {row - int(bounds[file]) + sizes[file] + 1} of {short(paths[file])!r}"

    return where


def short(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def concatenated(pieces: Sequence[pd.Series[Any]]) -> pd.Series[Any]:
    """One column of many files; where their types differ, each cell keeps its own."""
    import pandas as pd
    from pandas.api import types

    kinds = {piece.dtype for piece in pieces}
    if len(kinds) == 1:
        return pd.concat(pieces, ignore_index=True)
    if all(types.is_numeric_dtype(kind) and not types.is_bool_dtype(kind) for kind in kinds):
        return pd.Series(np.concatenate([piece.to_numpy(np.float64, na_value=np.nan) for piece in pieces]))
    # a file whose cells are all empty says nothing of the type
    return pd.Series(np.concatenate([piece.astype(object).to_numpy() for piece in pieces]), dtype=object)
