"""Which cells of a table count as missing: empty ones, and those that hold a mark such as NA, counted by mark."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

# what pandas takes for missing in a file; in a DataFrame the same words count, so that the same table gives the same federation
MARKS = (
    *("NA", "N/A", "n/a", "#N/A", "#N/A N/A", "#NA", "<NA>", "NaN", "nan", "-nan", "-NaN", "NULL", "null", "None", "NaT"),
    *("-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN"),
)

Marked = dict[str, dict[str, int]]  # by column: how often it held each mark


def without_marks(values: pd.Series[Any], marks: Collection[str]) -> tuple[pd.Series[Any], dict[str, int]]:
    """Return a column whose cells that hold a mark are empty, and how often each mark was there.

    Text that is all numbers but for its marks is returned as numbers. In a column of numbers a mark that is a number counts.
    """
    import pandas as pd
    from pandas.api import types

    if not marks or types.is_bool_dtype(values.dtype) or types.is_complex_dtype(values.dtype):
        return values, {}
    if types.is_numeric_dtype(values.dtype):
        return _without_numbers(values, marks)
    if not (types.is_object_dtype(values.dtype) or types.is_string_dtype(values.dtype) or _is_categorical(values)):
        return values, {}
    marked = _holding(values, {padded for mark in marks for padded in (mark, f" {mark}", f"{mark} ")})
    if not marked.any():
        return values, {}
    counts = {str(mark): int(count) for mark, count in values[marked].astype(str).str.strip().value_counts().items()}
    emptied = values.mask(marked)
    if _is_categorical(values):
        return emptied, counts
    try:
        numbers = pd.to_numeric(emptied.astype(object))
    except (ValueError, TypeError, OverflowError, ArithmeticError):
        return emptied, counts
    return (numbers if numbers.dtype != object and not emptied.isna().all() else emptied), counts


def added(pieces: Iterable[Marked]) -> Marked:
    """Return the counts of several tables together."""
    out: Marked = {}
    for piece in pieces:
        for name, counts in piece.items():
            mine = out.setdefault(name, {})
            for mark, count in counts.items():
                mine[mark] = mine.get(mark, 0) + count
    return out


def marked_note(marked: Mapping[str, Mapping[str, int]], most: int = 8) -> str | None:
    """Return a sentence that names the marks that were taken for missing, with counts; None if there were none."""
    if not marked:
        return None
    totals = added({"": dict(counts)} for counts in marked.values())[""]
    words = ", ".join(f"{mark!r} ({count:,})" for mark, count in sorted(totals.items(), key=lambda item: -item[1]))
    columns = ", ".join(repr(name) for name in list(marked)[:most]) + (
        f" and {len(marked) - most} more" if len(marked) > most else ""
    )
    return f"Taken for missing: {words}, in {columns} (--keep-na reads such words as values, --na adds others)."


def _without_numbers(values: pd.Series[Any], marks: Collection[str]) -> tuple[pd.Series[Any], dict[str, int]]:
    counts, out = {}, values
    for mark in marks:
        number = _number(mark)
        if number is None:
            continue
        marked = (values == number).to_numpy(bool, na_value=False)
        if marked.any():
            counts[mark] = int(marked.sum())
            out = out.mask(marked)
    return out, counts


def _number(mark: str) -> float | None:
    try:
        number = float(mark)
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def _holding(values: pd.Series[Any], marks: Collection[str]) -> NDArray[np.bool_]:
    try:
        return values.isin(marks).to_numpy(bool)
    except TypeError:  # a list among the cells
        return np.array([isinstance(value, str) and value in marks for value in values], bool)


def _is_categorical(values: pd.Series[Any]) -> bool:
    import pandas as pd

    return isinstance(values.dtype, pd.CategoricalDtype)
