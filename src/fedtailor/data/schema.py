"""Schema: how the columns of a table become features, kept so that new rows are read exactly as the training rows were."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import InvalidArgument, InvalidData

if TYPE_CHECKING:
    import pandas as pd

Where = Callable[[int], str]
Floats = NDArray[np.float64]
Features = NDArray[np.float32]

VERSION = 1
MISSING, OTHER = "missing", "other"
# what pandas reads as missing in a file counts as missing in a DataFrame too: the same table gives the same federation
BLANKS = frozenset({"", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "-nan", "-NaN", "NULL", "null", "None", "<NA>", "NaT"})
BLOCK = 16_384  # rows encoded at a time: the block's features stay in the cache while its columns are written
_DAY = np.timedelta64(1, "D")


@dataclass(frozen=True)
class Column:
    """One column of the table and the features it becomes.

    ``numeric``, ``bool`` and ``date`` columns give one feature, (value - mean) / scale, and a second one that is 1 where the
    value is missing if ``has_indicator``. A ``category`` column gives one feature per entry of ``categories``; ``other`` among
    them takes every value that is not listed, and without it such a value is 0 in all of them.
    """

    name: str
    kind: str
    fill: float = 0.0
    has_indicator: bool = False
    categories: tuple[str, ...] = ()
    origin: float = 0.0  # dates: the earliest training date, in days since 1970
    mean: float = 0.0
    scale: float = 1.0

    def names(self) -> list[str]:
        if self.kind == "category":
            return [f"{self.name}={category}" for category in self.categories]
        return [self.name, f"{self.name} missing"] if self.has_indicator else [self.name]

    def prepare(self, raw: Raw) -> NDArray[Any]:
        """What ``write`` takes: the feature of every row's category (-1: none of them), or numbers counted from the origin."""
        if self.kind != "category":
            return raw.values - self.origin if self.origin else raw.values
        place = {category: i for i, category in enumerate(self.categories)}
        rest = place.get(OTHER, -1)
        # the last entry is that of the code -1
        slots = np.array([place.get(t, rest) for t in raw.texts] + [place.get(MISSING, -1)], np.int16)
        return slots[raw.values]

    def write(self, values: NDArray[Any], out: Features, mean: float | Floats, scale: float | Floats) -> None:
        """Prepared values into ``out`` [rows, features], which holds zeros."""
        if self.kind == "category":
            rows = np.flatnonzero(values >= 0)
            out[rows, values[rows]] = 1
            return
        gap = np.isnan(values)
        if gap.any():
            values = np.where(gap, self.fill, values)
            if self.has_indicator:
                out[:, 1] = gap
        with np.errstate(over="ignore", invalid="ignore"):
            out[:, 0] = (values - mean) / scale


@dataclass(frozen=True)
class Schema:
    """What turns rows of a table into features: the columns, and with ``standardize="client"`` every client's own (mean, scale)
    of each of them. ``label_mean`` and ``label_scale`` bring a standardised target back to its units."""

    columns: tuple[Column, ...]
    client: str
    label: str
    kind: str
    classes: tuple[str, ...] = ()
    standardize: str = "pooled"
    clients: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    label_mean: float = 0.0
    label_scale: float = 1.0
    version: int = VERSION

    def names(self) -> list[str]:
        """Names of the features, in order."""
        return [name for column in self.columns for name in column.names()]

    def encode(self, frame: pd.DataFrame, client: str | None = None) -> Features:
        """Features [rows, features] of new rows, as a row of ``client`` is read; an unknown client's as a newcomer's (pooled)."""
        table = columns_of(frame)
        absent = [column.name for column in self.columns if column.name not in table]
        if absent:
            raise InvalidData(
                f"the table has no column {listed(absent)}; the model was trained on it, so add it (it may be empty)"
            )
        numbers = self.clients.get(client, ()) if client is not None else ()
        moments = numbers or tuple((column.mean, column.scale) for column in self.columns)
        raws = [read_column(column.name, table[column.name], column.kind) for column in self.columns]
        for column, raw in zip(self.columns, raws, strict=True):
            check_finite(column.name, raw)
        prepared = [column.prepare(raw) for column, raw in zip(self.columns, raws, strict=True)]
        out = np.zeros((len(frame), len(self.names())), np.float32)
        for start in range(0, len(out), BLOCK):
            block = slice(start, start + BLOCK)
            write_block(self.columns, [values[block] for values in prepared], out[block], moments)
        return out

    def restore(self, values: Floats) -> Floats:
        """Predicted targets in the units of the label column."""
        return values * self.label_scale + self.label_mean

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers; ``from_json`` gives back an equal schema."""
        return _plain(asdict(self))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Schema:
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != VERSION:
            raise InvalidData(f"the schema has version {version!r} but this fedtailor reads {VERSION}; use the one that wrote it")
        try:
            columns = tuple(Column(**{**c, "categories": tuple(c["categories"])}) for c in data["columns"])
            clients = {name: tuple((mean, scale) for mean, scale in own) for name, own in data["clients"].items()}
            rest = {f.name: data[f.name] for f in fields(Schema) if f.name not in ("columns", "clients", "classes")}
            return Schema(columns=columns, clients=clients, classes=tuple(data["classes"]), **rest)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidData(f"the schema cannot be read ({one_line(error)}); use a file that fedtailor wrote") from error


@dataclass(frozen=True)
class Raw:
    """A column as read: float64 with NaN where missing (``date``: days since 1970), or codes into ``texts``, -1 where missing."""

    kind: str
    values: NDArray[Any]
    texts: tuple[str, ...] = ()

    @property
    def missing(self) -> NDArray[np.bool_]:
        return self.values < 0 if self.kind == "category" else np.isnan(self.values)


def write_block(
    columns: Sequence[Column],
    values: Sequence[NDArray[Any]],
    out: Features,
    moments: Sequence[tuple[float | Floats, float | Floats]],
) -> None:
    """All columns of some rows, one beside the other."""
    at = 0
    for column, prepared, (mean, scale) in zip(columns, values, moments, strict=True):
        width = len(column.names())
        column.write(prepared, out[:, at : at + width], mean, scale)
        at += width
    if not np.isfinite(out).all():
        names = [column.name for column in columns for _ in column.names()]
        name = shown(names[int(np.flatnonzero(~np.isfinite(out).all(0))[0])])
        raise InvalidData(f"column {name} holds numbers too large or too far apart for 32-bit features; rescale it or --drop it")


def row_number(row: int) -> str:
    return f"row {row + 1}"


def columns_of(frame: pd.DataFrame) -> dict[str, pd.Series[Any]]:
    """The columns by name, as text; two of the same name are refused."""
    names = [text(name) for name in frame.columns]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidData(f"two columns are called {shown(twice)}; rename one of them")
    return {name: frame.iloc[:, i] for i, name in enumerate(names)}


def read_column(name: str, values: pd.Series[Any], kind: str | None = None, where: Where = row_number, words: int = 0) -> Raw:
    """A column read as ``kind``, or as what it looks like.

    Text that is all numbers is numeric and text that is all dates (YYYY-MM-DD) is a date; if most of it is and some is not, the
    column is refused, because a few bad cells would turn a measurement into categories (with ``words``, only if it holds more
    distinct texts than that).
    """
    try:
        raw = _read(name, values, kind, where)
    except ArithmeticError as error:  # a Decimal that is a signalling NaN
        raise InvalidData(f"column {shown(name)} holds a number that cannot be read; replace it, or --drop the column") from error
    if kind is None:
        return _settle(name, raw, where, words) if raw.kind == "category" and not _is_categorical(values) else raw
    return raw if raw.kind == kind else _convert(name, raw, kind, where)


def check_finite(name: str, raw: Raw, rows: NDArray[np.int64] | None = None, where: Where = row_number) -> None:
    """Refuse infinities, in ``rows`` only if given."""
    if raw.kind == "category" or not np.isinf(raw.values).any():
        return
    bad = np.flatnonzero(np.isinf(raw.values))
    bad = bad if rows is None else np.intersect1d(bad, rows)
    if len(bad):
        raise InvalidData(f"column {shown(name)} is infinite in {where(int(bad[0]))}; replace or drop it, or --drop the column")


def text(value: Any) -> str:
    """A value as it reads in a table: 3.0 is "3", midnight is the date."""
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)
    return str(value).removesuffix(" 00:00:00").encode("utf-8", "replace").decode()


def shown(value: Any) -> str:
    """A value for a message: quoted, in one line, not too long."""
    quoted = repr(text(value))
    return quoted if len(quoted) <= 60 else f"{quoted[:56]}...'"


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown(name) for name in names[:most]) + more


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def as_numbers(texts: Sequence[str]) -> Floats:
    """Texts as numbers, NaN where a text is none."""
    import pandas as pd

    # whole numbers beyond 64 bits make pandas answer in objects
    parsed: pd.Series[Any] = pd.to_numeric(pd.Series(list(texts), dtype=object), errors="coerce")
    return np.array([_number(value) for value in parsed], float) if parsed.dtype == object else parsed.to_numpy(np.float64)


def as_days(texts: Sequence[str]) -> Floats:
    """Texts as days since 1970, NaN where a text is no date of the form YYYY-MM-DD, with or without a time."""
    import pandas as pd

    series = pd.Series(list(texts), dtype=object)
    dated = series.str.match(r"\d{4}-\d{2}-\d{2}(?:$|[T ])").to_numpy(bool)
    days = np.full(len(series), np.nan)
    if dated.any():
        days[dated] = _days(pd.to_datetime(series[dated], format="ISO8601", errors="coerce", utc=True))
    return days


def _read(name: str, values: pd.Series[Any], kind: str | None, where: Where) -> Raw:
    """The column by its type alone."""
    import pandas as pd
    from pandas.api import types

    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return _coded(values.cat.codes.to_numpy(), [text(c) for c in values.cat.categories])
    if types.is_bool_dtype(dtype):
        return Raw("bool", values.to_numpy(np.float64, na_value=np.nan))
    if types.is_complex_dtype(dtype):
        raise InvalidData(f"column {shown(name)} holds complex numbers; give real ones, or --drop it")
    if types.is_numeric_dtype(dtype):
        if kind == "category":  # a long whole number keeps all its digits
            codes, distinct = pd.factorize(values)
            return _coded(codes, [text(value) for value in distinct])
        with np.errstate(over="ignore"):
            return Raw("numeric", values.to_numpy(np.float64, na_value=np.nan))
    if isinstance(dtype, pd.PeriodDtype):
        return Raw("date", _days(values.dt.to_timestamp()))
    if types.is_datetime64_any_dtype(dtype):
        return Raw("date", _days(values))
    if types.is_timedelta64_dtype(dtype):
        return Raw("numeric", values.to_numpy() / _DAY)
    return _read_objects(name, values, kind, where)


def _read_objects(name: str, values: pd.Series[Any], kind: str | None, where: Where) -> Raw:
    """A column of text or of Python objects."""
    import pandas as pd
    from pandas.api import types

    # a category is known by its cells' own texts, whatever else some rows look like together
    found = types.infer_dtype(values, skipna=True) if kind != "category" or values.dtype != object else "mixed"
    if found == "string":
        codes, distinct = pd.factorize(values)
        return _coded(codes, [text(value) for value in distinct])
    missing = values.isna().to_numpy(bool)
    if found in ("boolean", "integer", "floating", "mixed-integer-float", "decimal", "empty"):
        numbers = np.full(len(values), np.nan)
        numbers[~missing] = [_number(value) for value in values[~missing]]
        return Raw("bool" if found == "boolean" else "numeric", numbers)
    if found in ("datetime", "datetime64", "date"):
        return Raw("date", _days(pd.to_datetime(values, errors="coerce", utc=True)))
    if found in ("timedelta", "timedelta64"):
        return Raw("numeric", pd.to_timedelta(values).to_numpy() / _DAY)
    texts = np.full(len(values), None, object)
    for row in np.flatnonzero(~missing):
        value = values.iloc[row]
        if not types.is_scalar(value) or isinstance(value, (bytes, complex)):
            what = type(value).__name__
            raise InvalidData(
                f"column {shown(name)} holds a {what} in {where(int(row))}; give one number or word per cell, or --drop it"
            )
        texts[row] = text(value)
    codes, words = pd.factorize(texts)
    return _coded(codes, list(words))


def _coded(codes: NDArray[Any], texts: Sequence[str]) -> Raw:
    """Codes whose texts are distinct and never blank."""
    place: dict[str, int] = {}
    new = [-1 if t in BLANKS or not t.strip() else place.setdefault(t, len(place)) for t in texts]
    if new == list(range(len(texts))):
        return Raw("category", codes, tuple(texts))
    return Raw("category", np.array([*new, -1], np.int64)[codes], tuple(place))


def _is_categorical(values: pd.Series[Any]) -> bool:
    import pandas as pd

    return isinstance(values.dtype, pd.CategoricalDtype)


def _settle(name: str, raw: Raw, where: Where, words: int) -> Raw:
    """Text as numbers or dates if it is all of them, as categories if it is mostly words."""
    for kind, what, parse in (("numeric", "numbers", as_numbers), ("date", "dates", as_days)):
        parsed = parse(raw.texts)
        good = ~np.isnan(parsed)
        if not good.any():
            continue
        if good.all():
            return Raw(kind, np.append(parsed, np.nan)[raw.values])
        present = raw.values[raw.values >= 0]
        if len(good) > words and 2 * int(good[present].sum()) > len(present):
            row = int(np.flatnonzero((raw.values >= 0) & ~np.append(good, True)[raw.values])[0])
            value = shown(raw.texts[raw.values[row]])
            raise InvalidData(f"column {shown(name)} holds {what} but {value} in {where(row)}; fix it, or --drop {shown(name)}")
    return raw


def _convert(name: str, raw: Raw, kind: str, where: Where) -> Raw:
    """A column that reads as one kind taken as another."""
    import pandas as pd

    if kind == "category":
        codes, distinct = pd.factorize(raw.values)
        texts = {
            "numeric": lambda v: text(v),
            "bool": lambda v: str(v != 0),
            "date": lambda v: text(np.datetime64(round(v * 86_400), "s")).replace("T", " ").removesuffix(" 00:00:00"),
        }[raw.kind]
        return _coded(codes, [texts(value) for value in distinct])
    if raw.missing.all():
        return Raw(kind, np.full(len(raw.values), np.nan))
    if kind == "numeric" and raw.kind == "bool":
        return Raw(kind, raw.values)
    wrong = ~raw.missing
    if raw.kind == "category":
        parse = {"numeric": as_numbers, "date": as_days, "bool": _as_truths}[kind]
        values = np.append(parse(raw.texts), np.nan)[raw.values]
        wrong &= np.isnan(values)
    elif kind == "bool" and raw.kind == "numeric":
        values = raw.values
        wrong &= (values != 0) & (values != 1)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        value = shown(raw.texts[raw.values[row]] if raw.kind == "category" else raw.values[row])
        what = {"numeric": "numbers", "bool": "true or false", "date": "dates (YYYY-MM-DD)"}[kind]
        raise InvalidData(f"column {shown(name)} must hold {what} but {where(row)} holds {value}; fix it or leave the cell empty")
    return Raw(kind, values)


def _as_truths(texts: Sequence[str]) -> Floats:
    truths = {"true": 1.0, "1": 1.0, "false": 0.0, "0": 0.0}
    return np.array([truths.get(t.lower(), np.nan) for t in texts], float)


def _number(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _days(values: pd.Series[Any]) -> Floats:
    """Dates as days since 1970, NaN where missing."""
    naive = values.dt.tz_convert(None) if getattr(values.dtype, "tz", None) is not None else values
    stamps = naive.to_numpy("datetime64[us]")
    days = (stamps - np.datetime64(0, "us")) / _DAY
    days[np.isnat(stamps)] = np.nan
    return days


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def check_choice(option: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidArgument(f"{option}={shown(value)} is unknown; use one of {', '.join(choices)}")
