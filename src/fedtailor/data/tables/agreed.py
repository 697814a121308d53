"""Columns as people agreed on them: a TOML file that says how each is read, so that nothing is learnt from anybody's rows."""

from __future__ import annotations

import datetime
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedtailor.data.columns import Ints, Raw, Table, check_finite, read_column
from fedtailor.data.federation import Federation
from fedtailor.data.formats import STYLES
from fedtailor.data.schema import MISSING, OTHER, Column
from fedtailor.data.tables.codes import take_rows, tally
from fedtailor.data.tables.options import TableOptions
from fedtailor.data.tables.target import Target
from fedtailor.data.words import Where, counted, listed, one_line, shown
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.task.kinds import CLASSIFICATION, REGRESSION, Kind

FORMAT = 1
TYPES = {"number": "numeric", "date": "date", "bool": "bool", "category": "category"}
KEYS = {"type", "range", "categories", "fill", "indicator", "style"}
EPOCH = datetime.date(1970, 1, 1)
HEAD = """\
# How each column is read, for --columns: nothing is then learnt from the rows. Numbers and dates are scaled so that their
# range becomes -1 to 1. It was written from rows: round the ranges and look at the categories before you pass it on.
"""


@dataclass(frozen=True)
class AgreedColumns:
    """The columns of a file: what they become, the ranges of numbers and dates, and the label with its classes or its range."""

    path: str
    label: str
    columns: tuple[Column, ...]
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    filled: frozenset[str] = frozenset()  # columns with a fill
    classes: tuple[str, ...] = ()
    label_range: tuple[float, float] | None = None

    @property
    def task(self) -> Kind:
        return CLASSIFICATION if self.classes else REGRESSION


def read_agreed(options: TableOptions, label: str) -> AgreedColumns:
    """Return the columns of the file ``options.columns``; whatever is wrong with it is one line that names the entry."""
    path = Path(str(options.columns)).expanduser()
    for option in ("features", "drop"):
        if getattr(options, option):
            raise InvalidArgument(f"--columns {path} says which columns are read; leave out --{option}")
    if options.standardize == "client":
        raise InvalidArgument(f"--columns {path} says how columns are scaled; leave out --standardize client")
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InvalidArgument(f"there is no file {path}; write one with fedtailor data describe --save-columns") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read as TOML ({one_line(error)}); fix it") from None
    try:
        return _agreed(str(path), content, label, options)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgument(
            f"{path} is no file of columns ({one_line(error)}); write one with data describe --save-columns"
        ) from None


def _agreed(path: str, content: Mapping[str, Any], label: str, options: TableOptions) -> AgreedColumns:
    if content.get("format") != FORMAT:
        raise InvalidArgument(f"{path} has format {content.get('format')!r} but this fedtailor reads {FORMAT}; write it anew")
    about = content["label"]
    if about["name"] != label:
        raise InvalidArgument(f"{path} is for the label {shown(about['name'])}, not {shown(label)}; give the file of this label")
    scaled = options.standardize != "none"
    entries = {name: _checked(path, name, entry) for name, entry in content["columns"].items()}
    if not entries:
        raise InvalidArgument(f"{path} has no columns; write one with data describe --save-columns")
    ranges = {name: _range(path, name, entry["range"]) for name, entry in entries.items() if "range" in entry}
    return AgreedColumns(
        path,
        label,
        tuple(_column(name, entry, ranges.get(name, (0.0, 0.0)), scaled) for name, entry in entries.items()),
        ranges,
        frozenset(name for name, entry in entries.items() if "fill" in entry),
        tuple(map(str, about.get("classes", ()))),
        _range(path, label, about["range"]) if "range" in about else None,
    )


def _checked(path: str, name: str, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = entry.get("type")
    if kind not in TYPES:
        raise InvalidArgument(f"{path}: column {shown(name)} has the type {shown(kind)}; use one of {', '.join(TYPES)}")
    if unknown := sorted(set(entry) - KEYS):
        raise InvalidArgument(f"{path}: column {shown(name)} has {listed(unknown)}; its entries are {', '.join(sorted(KEYS))}")
    needed = "categories" if kind == "category" else "range" if kind in ("number", "date") else "type"
    if needed not in entry:
        raise InvalidArgument(f"{path}: column {shown(name)} has no {needed}; give it")
    style = entry.get("style", "")
    if style and (style not in STYLES or STYLES[style].kind != TYPES[kind]):
        possible = ", ".join(repr(other) for other, about in STYLES.items() if about.kind == TYPES[kind] and about.note)
        raise InvalidArgument(
            f"{path}: column {shown(name)} has the style {shown(style)}; use one of {possible or 'none'}, or none"
        )
    return entry


def _range(path: str, name: str, ends: Sequence[Any]) -> tuple[float, float]:
    low, high = map(_plain, ends)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InvalidArgument(f"{path}: the range of {shown(name)} must be two numbers or dates, the smaller first")
    return low, high


def _column(name: str, entry: Mapping[str, Any], ends: tuple[float, float], scaled: bool) -> Column:
    kind = TYPES[entry["type"]]
    if kind == "category":
        categories = tuple(map(str, entry["categories"]))
        if len(set(categories)) < max(2, len(categories)):
            raise ValueError(f"{name!r} needs two categories or more, each once")
        return Column(name, kind, categories=categories)
    fill, indicator = _plain(entry.get("fill", 0)), bool(entry.get("indicator", False))
    if kind == "bool":
        return Column(name, kind, fill, indicator)
    low, high = ends
    origin = low if kind == "date" else 0.0
    mean, scale = ((low + high) / 2 - origin, (high - low) / 2) if scaled else (0.0, 1.0)
    return Column(name, kind, fill - origin, indicator, origin=origin, mean=mean, scale=scale, style=entry.get("style", ""))


def _plain(value: Any) -> float:
    """Return a number, or a date as days since 1970."""
    if isinstance(value, datetime.datetime):
        return (value.replace(tzinfo=None) - datetime.datetime(1970, 1, 1)) / datetime.timedelta(days=1)
    return float((value - EPOCH).days if isinstance(value, datetime.date) else value)


def agreed_columns(agreed: AgreedColumns, table: Table, rows: Ints, where: Where) -> dict[str, Raw]:
    """Return the columns as read, each of the type given; a missing value where no fill is given is refused."""
    raws = {}
    for column in agreed.columns:
        if column.name not in table:
            raise InvalidData(
                f"the table has no column {shown(column.name)}, which {agreed.path} names; add it (it may be empty)"
            )
        raw = read_column(column.name, table[column.name], column.kind, where, droppable=False, style=column.style)
        check_finite(column.name, raw, rows, where, droppable=False)
        if column.kind != "category" and column.name not in agreed.filled and take_rows(raw.missing, rows).any():
            raise InvalidData(f"values are missing in {shown(column.name)}, of which {agreed.path} gives no fill; add fill = ...")
        raws[column.name] = raw
    return raws


def agreed_classes(agreed: AgreedColumns, target: Target, where: Where) -> Target:
    """Return the target with the classes given, in their order; a label that is none of them is refused by row."""
    if not target.kind.softmax:
        if agreed.classes:
            raise InvalidArgument(f"{agreed.path} gives classes of {shown(agreed.label)}; use --task classification")
        if agreed.label_range is None:
            raise InvalidArgument(f"{agreed.path} gives no range of {shown(agreed.label)}; add range = [low, high] to its label")
        return replace(target, why=f"{agreed.path} gives its range")
    if not agreed.classes:
        raise InvalidArgument(f"{agreed.path} gives no classes of {shown(agreed.label)}; add classes = [...] to its label")
    place = {name: i for i, name in enumerate(agreed.classes)}
    strange = [i for i, name in enumerate(target.classes) if name not in place]
    if strange:
        row = int(np.flatnonzero(np.isin(target.values, strange))[0])
        value = shown(target.classes[int(target.values[row])])
        raise InvalidData(
            f"the label {shown(agreed.label)} is {value} in {where(row)}, no class of {agreed.path}; fix it or add it"
        )
    number = np.array([*(place[name] for name in target.classes), -1], target.values.dtype)
    return Target(
        CLASSIFICATION, number[target.values], target.missing, agreed.classes, f"{agreed.path} gives its classes", target.notes
    )


def agreed_notes(agreed: AgreedColumns, table: Table, raws: Mapping[str, Raw], rows: Ints, known: Sequence[str]) -> list[str]:
    """Return what the file did to the table: columns it does not name, values outside its ranges and categories."""
    width = sum(len(column.names()) for column in agreed.columns)
    became = f"{counted(len(agreed.columns), 'column')} became {counted(width, 'feature')}"
    notes = [f"{became}, as {agreed.path} says; nothing was learnt from the rows."]
    if ignored := [name for name in table if name not in raws and name not in known]:
        notes.append(f"Columns that {agreed.path} does not name were left out: {listed(ignored, 10)}.")
    for column in agreed.columns:
        raw = raws[column.name]
        values = take_rows(raw.values, rows)
        if column.kind == "category":
            counts = tally(values, len(raw.texts))
            strange = [i for i, name in enumerate(raw.texts) if counts[i] and name not in column.categories]
            if strange:
                treatment = f"count as {OTHER!r}" if OTHER in column.categories else "are 0 in all its features"
                names = listed(raw.texts[i] for i in strange)
                notes.append(
                    f"{int(counts[strange].sum()):,} values of {shown(column.name)} are not listed and {treatment}: {names}."
                )
            if MISSING not in column.categories and counts.sum() < len(values):
                gaps = len(values) - int(counts.sum())
                notes.append(f"{gaps:,} missing values of {shown(column.name)} are 0 in all its features.")
        elif column.name in agreed.ranges:
            low, high = agreed.ranges[column.name]
            outside = int(((values < low) | (values > high)).sum())
            notes += [f"{outside:,} values of {shown(column.name)} are outside its range; they are kept."] if outside else []
    return notes


def columns_file(federation: Federation) -> str:
    """Return the file of columns of a federation that was read from a table: its training rows' ranges, categories and fills."""
    schema = federation.schema
    if schema is None:
        raise InvalidArgument(f"{federation.name} was not read from a table, so it has no columns to save")
    x, at, columns = federation.train.x.double().numpy(), 0, {}
    owner = np.repeat(np.arange(len(federation)), federation.train.sizes)
    for i, column in enumerate(schema.columns):
        moments = np.array(
            [schema.clients[name][i] if schema.clients else (column.mean, column.scale) for name in federation.names]
        )
        values = x[:, at] * moments[owner, 1] + moments[owner, 0] + column.origin
        columns[column.name] = _entry(column, float(values.min()), float(values.max()))
        at += len(column.names())
    label: dict[str, Any] = {"name": schema.label}
    if federation.kind.softmax:
        label["classes"] = list(schema.classes)
    else:
        targets = schema.restore(federation.train.y.double().numpy())
        label["range"] = list(_outward(float(targets.min()), float(targets.max())))
    return HEAD + tomli_w.dumps({"format": FORMAT, "label": label, "columns": columns}, multiline_strings=False)


def _entry(column: Column, low: float, high: float) -> dict[str, Any]:
    kind = next(name for name, kind in TYPES.items() if kind == column.kind)
    if column.kind == "category":
        return {"type": kind, "categories": list(column.categories)}
    more: dict[str, Any] = {"indicator": True} if column.has_indicator else {}
    more |= {"style": column.style} if column.style else {}
    if column.kind == "bool":
        return {"type": kind, "fill": bool(column.fill), **more}
    if column.kind == "date":
        first, last = math.floor(low + 1e-3), math.ceil(high - 1e-3)
        days = (first, max(last, first + 1), round(column.fill + column.origin))
        low_day, high_day, fill = (EPOCH + datetime.timedelta(days=day) for day in days)
        return {"type": kind, "range": [low_day, high_day], "fill": fill, **more}
    return {"type": kind, "range": list(_outward(low, high)), "fill": column.fill, **more}


def _outward(low: float, high: float) -> tuple[float, float]:
    """Return the ends rounded outwards to three digits of their distance."""
    if not low < high:
        return low, low + 1.0
    step = 10.0 ** (math.floor(math.log10(high - low)) - 2)
    tiny = 1e-3  # features are in single precision: their ends are a little off
    return round(math.floor(low / step + tiny) * step, 12), round(math.ceil(high / step - tiny) * step, 12)
