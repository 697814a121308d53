"""A column of a table as read: numbers, truth values, dates, or texts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.formats import STYLES, Floats, as_days, as_numbers, days_of, guess, number
from fedtailor.data.words import Where, row_number, shown, text
from fedtailor.errors import InvalidData

if TYPE_CHECKING:
    import pandas as pd

Ints = NDArray[np.int64]
Table = Mapping[str, "pd.Series[Any]"]  # by the names of the columns

_DAY = np.timedelta64(1, "D")


@dataclass(frozen=True)
class Raw:
    """A column as read: int64, or float64 with NaN where missing (``date``: days since 1970), or codes into ``texts``, -1 where
    missing. Numbers and dates that were written in a ``style`` (``formats.STYLES``) keep their texts."""

    kind: str
    values: NDArray[Any]
    texts: tuple[str, ...] = ()
    style: str = ""

    @cached_property
    def missing(self) -> NDArray[np.bool_]:
        if self.kind == "category":
            return self.values < 0
        return np.zeros(len(self.values), bool) if self.is_finite else np.isnan(self.values)

    @cached_property
    def is_finite(self) -> bool:
        """Return whether a column of numbers surely has neither gaps nor infinities: their sum, which is found faster, is a
        number."""
        if self.values.dtype.kind in "iu":
            return True
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(self.values.sum()))


@dataclass(frozen=True)
class Subject:
    """What an error message is about: a column, how its rows are named, and whether the user can drop the column."""

    name: str
    where: Where
    droppable: bool

    def refusal(self, wrong: str, fix: str) -> InvalidData:
        way_out = f"--drop {shown(self.name)}" if self.droppable else "remove the row"
        return InvalidData(f"column {shown(self.name)} {wrong}; {fix}, or {way_out}")


def is_frame(value: Any) -> bool:
    """Return whether a value is a pandas DataFrame, without importing pandas for it."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def columns_of(frame: pd.DataFrame) -> dict[str, pd.Series[Any]]:
    """Return the columns by name, as text; two of the same name are refused."""
    names = [text(name) for name in frame.columns]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise InvalidData(f"two columns are called {shown(duplicate)}; rename one of them")
    return {name: frame.iloc[:, i] for i, name in enumerate(names)}


def read_column(
    name: str,
    values: pd.Series[Any],
    kind: str | None = None,
    where: Where = row_number,
    words: int = 0,
    droppable: bool = True,
    style: str = "",
) -> Raw:
    """Read a column as ``kind``, its text written in ``style``; or as what it looks like. Only empty cells are missing.

    Text that is all numbers is numeric and text that is all dates is a date, in one of ``formats.STYLES``; if most of it is and
    some is not, the column is refused, because a few bad cells would turn a measurement into categories (with ``words``, only if
    it holds more distinct texts than that).
    """
    subject = Subject(name, where, droppable)
    try:
        raw = _read(subject, values, kind)
    except ArithmeticError as error:  # a Decimal that is a signalling NaN
        raise subject.refusal("holds a number that cannot be read", "replace it") from error
    if kind is None:
        return _settle(subject, raw, words) if raw.kind == "category" and not _is_categorical(values) else raw
    return raw if raw.kind == kind else _convert(subject, raw, kind, style)


def is_text(values: pd.Series[Any]) -> bool:
    """Return whether all cells of a column that are not missing are text."""
    import pandas as pd
    from pandas.api import types

    if types.is_object_dtype(values.dtype):
        return types.infer_dtype(values, skipna=True) == "string"
    return isinstance(values.dtype, pd.StringDtype)


def read_words(name: str, values: pd.Series[Any], where: Where, words: int) -> tuple[Raw, Raw]:
    """Read a column of text twice, of which the texts are found once: as what it looks like, and as the words it holds."""
    subject = Subject(name, where, droppable=False)
    raw = _read(subject, values, "category")
    return _settle(subject, raw, words), raw


def check_finite(name: str, raw: Raw, rows: Ints | None = None, where: Where = row_number, droppable: bool = True) -> None:
    """Refuse infinities, in ``rows`` only if given."""
    if raw.kind == "category" or raw.is_finite or not np.isinf(raw.values).any():
        return
    bad = np.flatnonzero(np.isinf(raw.values))
    bad = bad if rows is None else np.intersect1d(bad, rows)
    if len(bad):
        fix = "replace or drop it" if droppable else "replace it"
        raise Subject(name, where, droppable).refusal(f"is infinite in {where(int(bad[0]))}", fix)


def _read(subject: Subject, values: pd.Series[Any], kind: str | None) -> Raw:
    """Read a column by its type alone."""
    import pandas as pd
    from pandas.api import types

    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return _coded(values.cat.codes.to_numpy(), [text(c) for c in values.cat.categories])
    if types.is_bool_dtype(dtype):
        return Raw("bool", values.to_numpy(np.float64, na_value=np.nan))
    if types.is_complex_dtype(dtype):
        other = f", or --drop {shown(subject.name)}" if subject.droppable else ""
        raise InvalidData(f"column {shown(subject.name)} holds complex numbers; give real ones{other}")
    if types.is_numeric_dtype(dtype):
        if kind == "category":  # a long whole number keeps all its digits
            codes, distinct = _factorize(values)
            return _coded(codes, [text(value) for value in distinct])
        if dtype == np.int64:  # as it stands: a copy would double its memory
            return Raw("numeric", values.to_numpy())
        with np.errstate(over="ignore"):
            return Raw("numeric", values.to_numpy(np.float64, na_value=np.nan))
    if isinstance(dtype, pd.PeriodDtype):
        return Raw("date", days_of(values.dt.to_timestamp()))
    if types.is_datetime64_any_dtype(dtype):
        return Raw("date", days_of(values))
    if types.is_timedelta64_dtype(dtype):
        return Raw("numeric", values.to_numpy() / _DAY)
    return _read_objects(subject, values, kind)


def _factorize(values: pd.Series[Any]) -> tuple[NDArray[Any], Sequence[Any]]:
    """Return the codes and the distinct values of a column of numbers."""
    import pandas as pd

    if values.dtype == np.int64 and len(values):
        numbers = values.to_numpy()
        low, high = int(numbers.min()), int(numbers.max())
        if high - low < len(numbers):  # counting is three times faster than hashing
            codes = numbers - low if low else numbers
            present = np.flatnonzero(np.bincount(codes))
            if len(present) <= high - low:
                number = np.zeros(high - low + 1, np.int64)
                number[present] = np.arange(len(present))
                codes = number[codes]
            return codes, (present + low).tolist()
    codes, distinct = pd.factorize(values)
    return codes, list(distinct)


def _read_objects(subject: Subject, values: pd.Series[Any], kind: str | None) -> Raw:
    """Read a column of text or of Python objects."""
    import pandas as pd
    from pandas.api import types

    inferred = types.infer_dtype(values, skipna=True)
    if kind == "category" and values.dtype == object and inferred != "string":
        inferred = "mixed"  # a category is known by its cells' own texts, whatever else some rows look like together
    if inferred == "string":
        codes, distinct = pd.factorize(values)
        return _coded(codes, [text(value) for value in distinct])
    missing = values.isna().to_numpy(bool)
    if inferred in ("boolean", "integer", "floating", "mixed-integer-float", "decimal", "empty"):
        numbers = np.full(len(values), np.nan)
        numbers[~missing] = [number(value) for value in values[~missing]]
        return Raw("bool" if inferred == "boolean" else "numeric", numbers)
    if inferred in ("datetime", "datetime64", "date"):
        return Raw("date", days_of(pd.to_datetime(values, errors="coerce", utc=True)))
    if inferred in ("timedelta", "timedelta64"):
        return Raw("numeric", pd.to_timedelta(values).to_numpy() / _DAY)
    texts = np.full(len(values), None, object)
    for row in np.flatnonzero(~missing):
        value = values.iloc[row]
        if not types.is_scalar(value) or isinstance(value, (bytes, complex)):
            wrong = f"holds a {type(value).__name__} in {subject.where(int(row))}"
            raise subject.refusal(wrong, "give one number or word per cell")
        texts[row] = text(value)
    codes, words = pd.factorize(texts)
    return _coded(codes, list(words))


def _coded(codes: NDArray[Any], texts: Sequence[str]) -> Raw:
    """Return a column of codes whose texts are distinct and never blank."""
    place: dict[str, int] = {}
    new = [-1 if not t.strip() else place.setdefault(t, len(place)) for t in texts]
    if new == list(range(len(texts))):
        return Raw("category", codes, tuple(texts))
    return Raw("category", np.array([*new, -1], np.int64)[codes], tuple(place))


def _is_categorical(values: pd.Series[Any]) -> bool:
    import pandas as pd

    return isinstance(values.dtype, pd.CategoricalDtype)


def _settle(subject: Subject, raw: Raw, words: int) -> Raw:
    """Turn text into numbers or dates if all of it is, and leave it as categories if it is mostly words."""
    guessed = guess(raw.texts)
    if guessed is None:
        return raw
    good = ~np.isnan(guessed.values)
    if good.all():
        style = "" if guessed.style == "iso" else guessed.style
        return Raw(guessed.kind, np.append(guessed.values, np.nan)[raw.values], raw.texts if style else (), style)
    present = raw.values[raw.values >= 0]
    if len(good) > words and 2 * int(good[present].sum()) > len(present):
        row = int(np.flatnonzero((raw.values >= 0) & ~np.append(good, True)[raw.values])[0])
        value = raw.texts[raw.values[row]]
        mark = (
            f" (--na {shown(value)} if it stands for a missing value)"
            if subject.droppable and value not in ("True", "False")
            else ""
        )
        raise subject.refusal(
            f"holds {STYLES[guessed.style].content} but {shown(value)} in {subject.where(row)}", f"fix it{mark}"
        )
    return raw


def _convert(subject: Subject, raw: Raw, kind: str, style: str) -> Raw:
    """Convert a column that was read as one kind into another."""
    import pandas as pd

    if kind == "category":
        codes, distinct = pd.factorize(raw.values)
        to_text = {
            "numeric": lambda v: text(v),
            "bool": lambda v: str(v != 0),
            "date": lambda v: text(np.datetime64(round(v * 86_400), "s")).replace("T", " ").removesuffix(" 00:00:00"),
        }[raw.kind]
        return _coded(codes, [to_text(value) for value in distinct])
    if raw.missing.all():
        return Raw(kind, np.full(len(raw.values), np.nan))
    if kind == "numeric" and raw.kind == "bool":
        return Raw(kind, raw.values)
    wrong = ~raw.missing
    if raw.kind == "category":
        parse = {"numeric": as_numbers, "date": as_days, "bool": _as_truths}[kind]
        parsed = STYLES[style].parse(raw.texts) if style else parse(raw.texts)
        values = np.append(np.where(np.isnan(parsed), parse(raw.texts), parsed) if style else parsed, np.nan)[raw.values]
        wrong &= np.isnan(values)
    elif kind == "bool" and raw.kind == "numeric":
        values = raw.values
        wrong &= (values != 0) & (values != 1)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        value = shown(raw.texts[raw.values[row]] if raw.kind == "category" else raw.values[row])
        expected = {"numeric": "numbers", "bool": "true or false", "date": "dates (YYYY-MM-DD)"}[kind]
        expected = f"{STYLES[style].content} ({STYLES[style].note})" if style else expected
        raise InvalidData(
            f"column {shown(subject.name)} must hold {expected} but {subject.where(row)} holds {value}; "
            "fix it or leave the cell empty"
        )
    return Raw(kind, values)


def _as_truths(texts: Sequence[str]) -> Floats:
    truths = {"true": 1.0, "1": 1.0, "false": 0.0, "0": 0.0}
    return np.array([truths.get(t.lower(), np.nan) for t in texts], float)
