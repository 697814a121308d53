"""Schema: how the columns of a table become features, kept so that new rows are read exactly as the training rows were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.columns import Raw, check_finite, columns_of, read_column
from fedtailor.data.formats import Floats, as_numbers
from fedtailor.data.missing import MARKS, without_marks
from fedtailor.data.words import Where, listed, one_line, row_number, shown
from fedtailor.errors import InvalidData

if TYPE_CHECKING:
    import pandas as pd

Features = NDArray[np.float32]

VERSION = 1
MISSING, OTHER = "missing", "other"
BLOCK = 16_384  # rows encoded at a time: the block's features stay in the cache while its columns are written


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
    style: str = ""  # how numbers and dates are written (``formats.STYLES``)

    def names(self) -> list[str]:
        if self.kind == "category":
            return [f"{self.name}={category}" for category in self.categories]
        return [self.name, f"{self.name} missing"] if self.has_indicator else [self.name]

    def prepare(self, raw: Raw) -> NDArray[Any]:
        """Return the values for ``write``: the feature of every row's category (-1: none), or numbers counted from the origin."""
        if self.kind != "category":
            return raw.values - self.origin if self.origin else raw.values
        place = {category: i for i, category in enumerate(self.categories)}
        rest = place.get(OTHER, -1)
        # the last entry is that of the code -1
        slots = np.array([place.get(t, rest) for t in raw.texts] + [place.get(MISSING, -1)], np.int16)
        return slots[raw.values]

    def write(self, values: NDArray[Any], out: Features, at: int, mean: float | Floats, scale: float | Floats) -> None:
        """Write prepared values into ``out`` [rows, features of all columns], contiguous zeros, from its column ``at`` on."""
        if self.kind == "category":
            rows = np.flatnonzero(values >= 0)
            # one index is four times faster than a pair
            out.reshape(-1)[rows * out.shape[1] + at + values[rows]] = 1
            return
        gap = np.isnan(values)
        if gap.any():
            values = np.where(gap, self.fill, values)
            if self.has_indicator:
                out[:, at + 1] = gap
        with np.errstate(over="ignore", invalid="ignore"):
            out[:, at] = (values - mean) / scale


@dataclass(frozen=True)
class Schema:
    """What turns rows of a table into features: the columns, and with ``standardize="client"`` every client's own (mean, scale)
    of each of them. ``label_mean`` and ``label_scale`` bring a standardised target back to its units. Cells that hold one of
    ``marks`` are missing. ``public`` says that the columns were given, not learnt from rows, and ``merged_clients`` that clients
    that look alike are one."""

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
    marks: tuple[str, ...] = MARKS
    public: bool = False
    merged_clients: bool = False

    def names(self) -> list[str]:
        """Return the names of the features, in order."""
        return [name for column in self.columns for name in column.names()]

    def encode(self, frame: pd.DataFrame, client: str | None = None, where: Where = row_number) -> Features:
        """Return features [rows, features] of new rows, scaled as ``client``'s are, or as pooled if it is unknown; messages
        call a row by ``where``."""
        table = columns_of(frame)
        absent = [column.name for column in self.columns if column.name not in table]
        if absent:
            raise InvalidData(
                f"the table has no column {listed(absent)}; the model was trained on it, so add it (it may be empty)"
            )
        numbers = self.clients.get(client, ()) if client is not None else ()
        moments = numbers or tuple((column.mean, column.scale) for column in self.columns)
        prepared = [column.prepare(_read_again(column, table[column.name], self.marks, where)) for column in self.columns]
        out = np.zeros((len(frame), len(self.names())), np.float32)
        for start in range(0, len(out), BLOCK):
            block = slice(start, start + BLOCK)
            write_block(self.columns, [values[block] for values in prepared], out[block], moments)
        return out

    def restore(self, values: Floats) -> Floats:
        """Return predicted targets in the units of the label column."""
        return values * self.label_scale + self.label_mean

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dicts, strings and numbers, of which ``from_json`` makes an equal schema."""
        return _plain(asdict(self))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Schema:
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != VERSION:
            raise InvalidData(f"the schema has version {version!r} but this fedtailor reads {VERSION}; use the one that wrote it")
        try:
            columns = tuple(Column(**{**c, "categories": tuple(c["categories"])}) for c in data["columns"])
            clients = {name: tuple((mean, scale) for mean, scale in own) for name, own in data["clients"].items()}
            # not in the first runs, which read 0071 as 71
            later: dict[str, Any] = {"marks": tuple(data.get("marks", MARKS)), "public": bool(data.get("public", False))}
            later["merged_clients"] = bool(data.get("merged_clients", True))
            known = ("columns", "clients", "classes", *later)
            rest = {f.name: data[f.name] for f in fields(Schema) if f.name not in known}
            return Schema(columns=columns, clients=clients, classes=tuple(data["classes"]), **rest, **later)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidData(f"the schema cannot be read ({one_line(error)}); use a file that fedtailor wrote") from error


def write_block(
    columns: Sequence[Column],
    values: Sequence[NDArray[Any]],
    out: Features,
    moments: Sequence[tuple[float | Floats, float | Floats]],
) -> None:
    """Write the features of all columns for some rows, one beside the other, into contiguous zeros."""
    at = 0
    for column, prepared, (mean, scale) in zip(columns, values, moments, strict=True):
        column.write(prepared, out, at, mean, scale)
        at += len(column.names())
    if not np.isfinite(out).all():
        names = [column.name for column in columns for _ in column.names()]
        name = shown(names[int(np.flatnonzero(~np.isfinite(out).all(0))[0])])
        raise InvalidData(f"column {name} holds numbers too large or too far apart for 32-bit features; rescale it or --drop it")


def _read_again(column: Column, values: pd.Series[Any], marks: Sequence[str], where: Where) -> Raw:
    """Read a column of new rows as that of the training rows was read."""
    from pandas.api import types

    values, _ = without_marks(values, marks)
    raw = read_column(column.name, values, column.kind, where, droppable=False, style=column.style)
    check_finite(column.name, raw, where=where, droppable=False)
    # words such as 007 and true, all by themselves in a file, are taken for numbers and truth values
    if column.kind == "category" and (types.is_numeric_dtype(values.dtype) or types.is_bool_dtype(values.dtype)):
        return replace(raw, texts=_as_trained(raw.texts, column.categories))
    return raw


def _as_trained(texts: Sequence[str], categories: Sequence[str]) -> tuple[str, ...]:
    """Replace numbers and truth values by the one category of the same value; leave other texts as they are."""
    categories_by_value: dict[float | str, list[str]] = {}
    for category, value in zip(categories, _values_of(categories), strict=True):
        categories_by_value.setdefault(value, []).append(category)
    candidates = [categories_by_value.get(value, []) for value in _values_of(texts)]
    return tuple(matches[0] if len(matches) == 1 else t for t, matches in zip(texts, candidates, strict=True))


def _values_of(texts: Sequence[str]) -> list[float | str]:
    """Return the number that a text stands for, if float64 can tell it from all others, else the text in lower case."""
    numbers = as_numbers(texts)
    return [float(number) if abs(number) < 2**53 else t.lower() for t, number in zip(texts, numbers, strict=True)]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
