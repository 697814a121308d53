"""The schema that sites agree on before anybody looks at a row, and a site's table read by it.

Columns, ranges, categories and labels are written down, so nothing about the rows is learnt from how they are read: a number is
scaled by the middle and the width of its range, and a row that does not fit is refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedtailor.data.columns import Raw, check_finite, columns_of, read_column
from fedtailor.data.federation import Federation
from fedtailor.data.schema import Column, Schema
from fedtailor.data.split import Split
from fedtailor.data.tables.draw import draw_parts
from fedtailor.data.tables.read import read_table
from fedtailor.data.words import listed, row_number, shown
from fedtailor.engine.checked import Checked
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.runs import files
from fedtailor.sites.agreed import Rows
from fedtailor.task.kinds import CLASSIFICATION, REGRESSION

if TYPE_CHECKING:
    import pandas as pd

SPREAD = 12**0.5  # a uniform law has the width of its range over this for a deviation
PARTS = ("train", "test", "val")


class AgreedColumn(Checked):
    """A column to learn from: a number within a range, or one of a few words."""

    SWITCHES = ("may_be_missing",)

    name: str = Field(description="The column.")
    kind: Literal["numeric", "category"] = Field(description="Numbers or words.")
    range: tuple[float, float] | None = Field(None, description="The smallest and the largest number.")
    categories: tuple[str, ...] = Field((), description="All words there may be.")
    may_be_missing: bool = Field(False, description="Whether a value may be missing.")

    def column(self) -> Column:
        """Return how the column becomes features."""
        if self.kind == "category":
            if len(set(self.categories)) < 2:
                raise InvalidArgument(f"column {shown(self.name)} needs two categories or more; list them all")
            missing = ("missing",) if self.may_be_missing and "missing" not in self.categories else ()
            return Column(self.name, "category", categories=(*self.categories, *missing))
        if self.range is None or not self.range[0] < self.range[1] or not np.isfinite(self.range).all():
            raise InvalidArgument(f"column {shown(self.name)} needs a range, as range = [0, 100]")
        low, high = self.range
        middle, width = (low + high) / 2, (high - low) / SPREAD
        return Column(self.name, "numeric", fill=middle, has_indicator=self.may_be_missing, mean=middle, scale=width)


class AgreedTable(Checked):
    """What every site's table looks like, and how its rows are split into those to train, to choose and to test on."""

    label: str = Field(description="The column to predict.")
    classes: tuple[str, ...] = Field((), description="All labels there may be; none: a number is predicted.")
    range: tuple[float, float] | None = Field(None, description="The range of a number to predict.")
    columns: tuple[AgreedColumn, ...] = Field(description="The columns to predict from.", min_length=1)
    test_share: float = Field(0.25, gt=0, lt=1, description="Share of the rows to test on.")
    val_share: float = Field(0.15, ge=0, lt=1, description="Share of the rows to choose on.")
    seed: int = Field(0, ge=0, description="Seed of the split.")

    @classmethod
    def read(cls, path: Path) -> AgreedTable:
        """Return the schema in a file."""
        try:
            values = tomllib.loads(files.read(path).decode())
        except FileNotFoundError:
            raise InvalidArgument(f"there is no schema {path}; write one, or let sites init do it (--like TABLE)") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{path} cannot be read ({error}); correct it") from None
        columns = values.get("columns")
        if not isinstance(columns, list) or not all(isinstance(column, Mapping) for column in columns):
            raise InvalidArgument(f"{path} lists no columns; add a table [[columns]] for each")
        made = tuple(AgreedColumn.of(column, f"{path}: columns: ") for column in columns)
        table = cls.of({**values, "columns": made}, f"{path}: ")
        table.check()
        return table

    def check(self) -> None:
        """Refuse what cannot be agreed on."""
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names) or self.label in names:
            raise InvalidArgument("a column is listed twice, or is the label as well; list each once")
        if self.classes and len(set(self.classes)) < max(2, len(self.classes)):
            raise InvalidArgument("the label needs two classes or more, each listed once")
        if not self.classes and (self.range is None or not self.range[0] < self.range[1]):
            raise InvalidArgument("a number to predict needs a range, as range = [0, 100]; for classes list them")
        if self.test_share + self.val_share >= 1:
            raise InvalidArgument("test_share and val_share leave no rows to train on; use for instance 0.25 and 0.15")
        for column in self.columns:
            column.column()

    def reader(self) -> Schema:
        """Return what turns rows into features."""
        low, high = self.range or (0.0, 1.0)
        columns = tuple(column.column() for column in self.columns)
        if self.classes:
            return Schema(columns, "", self.label, CLASSIFICATION, self.classes)
        return Schema(columns, "", self.label, REGRESSION, label_mean=(low + high) / 2, label_scale=(high - low) / SPREAD)

    def rows(self) -> Rows:
        """Return what rows look like to a model."""
        schema = self.reader()
        kind = CLASSIFICATION if self.classes else REGRESSION
        return Rows((len(schema.names()),), kind, len(self.classes), 0, self.classes, self.val_share > 0, schema=schema)

    def public(self, path: Path) -> Tensor:
        """Return the rows of a table that everybody may see, checked like a site's; a label is not looked at."""
        frame = read_table(path)
        self._check(frame, path, [column.name for column in self.columns])
        return torch.from_numpy(self.reader().encode(frame))

    def _check(self, frame: pd.DataFrame, path: Path, needed: Sequence[str]) -> None:
        table = columns_of(frame)
        absent = [name for name in needed if name not in table]
        if absent:
            raise InvalidData(f"{path.name} has no column {listed(absent)}; the sites agreed on it: add it")
        for column in self.columns:
            _check_column(column, table[column.name])

    def federation(self, path: Path, client: str) -> Federation:
        """Return a site's table as a federation of this client alone; what does not fit the schema is refused."""
        frame = read_table(path)
        table = columns_of(frame)
        self._check(frame, path, [*(column.name for column in self.columns), self.label])
        y, strata = self._targets(table[self.label])
        shares = (1 - self.test_share - self.val_share, self.test_share, *([self.val_share] if self.val_share else []))
        if len(y) < 3 * len(shares):
            raise InvalidData(f"{path.name} has {len(y)} rows; a site needs {3 * len(shares)} or more to take part")
        schema = self.reader()
        x = torch.from_numpy(schema.encode(frame))
        part = draw_parts(np.array([len(y)]), strata, [client], self.classes or ("",), shares, self.seed)
        return self._split(x, y, part, client, path.name, schema)

    def _split(self, x: Tensor, y: Tensor, part: Any, client: str, name: str, schema: Schema) -> Federation:
        splits = {}
        for number, word in enumerate(PARTS[: 3 if self.val_share else 2]):
            rows = torch.from_numpy(np.flatnonzero(part == number))
            splits[word] = Split(x[rows], y[rows], np.array([0, len(rows)]))
        return Federation(
            train=splits["train"],
            test=splits["test"],
            val=splits.get("val"),
            names=(client,),
            kind=self.rows().kind,
            labels=len(self.classes),
            name=name,
            classes=self.classes,
            schema=schema,
            notes=(f"{len(y):,} rows of {client}, read by the schema that the sites agreed on.",),
        )

    def _targets(self, values: pd.Series[Any]) -> tuple[Tensor, Any]:
        """Return (targets, the class of every row to balance the split by)."""
        kind = "category" if self.classes else "numeric"
        raw = read_column(self.label, values, kind, droppable=False)
        check_finite(self.label, raw, droppable=False)
        if raw.missing.any():
            raise InvalidData(f"the label {shown(self.label)} is missing in {_first(raw.missing)}; fill it in or remove the row")
        if not self.classes:
            _check_range(self.label, raw, self.range or (0.0, 1.0))
            schema = self.reader()
            y = (raw.values.astype(np.float64) - schema.label_mean) / schema.label_scale
            return torch.from_numpy(y.astype(np.float32)), np.zeros(len(y), np.int64)
        place = {word: i for i, word in enumerate(self.classes)}
        codes = np.array([place.get(text, -1) for text in raw.texts], np.int64)[raw.values]
        if (codes < 0).any():
            word = shown(raw.texts[raw.values[int(np.flatnonzero(codes < 0)[0])]])
            where = _first(codes < 0)
            raise InvalidData(f"the label {shown(self.label)} is {word} in {where}; agreed on: {listed(self.classes)}")
        return torch.from_numpy(codes), codes


def _check_column(column: AgreedColumn, values: pd.Series[Any]) -> None:
    raw = read_column(column.name, values, column.kind, droppable=False)
    check_finite(column.name, raw, droppable=False)
    if raw.missing.any() and not column.may_be_missing:
        raise InvalidData(
            f"column {shown(column.name)} misses {_count(raw.missing)} (first in {_first(raw.missing)}), which was not agreed "
            "on; fill them in, or agree on may_be_missing = true"
        )
    if column.kind == "numeric":
        _check_range(column.name, raw, column.range or (0.0, 1.0))
        return
    known = np.array([text in column.categories for text in raw.texts] + [True])
    strange = ~known[raw.values]
    if strange.any():
        word = shown(raw.texts[raw.values[int(np.flatnonzero(strange)[0])]])
        raise InvalidData(
            f"column {shown(column.name)} holds {word} in {_first(strange)}; agreed on: {listed(column.categories)}; "
            "correct it, or agree on more categories"
        )


def _check_range(name: str, raw: Raw, bounds: tuple[float, float]) -> None:
    outside = (raw.values < bounds[0]) | (raw.values > bounds[1])
    if outside.any():
        raise InvalidData(
            f"column {shown(name)} has {_count(outside)} outside {bounds[0]:g} to {bounds[1]:g} (first in {_first(outside)}); "
            "correct them, or agree on another range"
        )


def _first(marked: Any) -> str:
    return row_number(int(np.flatnonzero(marked)[0]))


def _count(marked: Any) -> str:
    count = int(np.count_nonzero(marked))
    return "1 value" if count == 1 else f"{count:,} values"


def written_like(path: Path, label: str, client: str | None = None) -> dict[str, Any]:
    """Return a schema with the ranges and categories of a table, to be looked over before anybody agrees to it."""
    table = columns_of(read_table(path))
    if label not in table:
        raise InvalidArgument(f"there is no column {shown(label)} in {path.name}; name the label")
    columns = [_seen(name, values) for name, values in table.items() if name not in (label, client)]
    raw = read_column(label, table[label], None, droppable=False)
    target: dict[str, Any] = {"classes": sorted(raw.texts)}
    if raw.kind != "category":
        target = {"range": [float(np.nanmin(raw.values)), float(np.nanmax(raw.values))]}
    return {"label": label, **target, "test_share": 0.25, "val_share": 0.15, "seed": 0, "columns": columns}


def _seen(name: str, values: pd.Series[Any]) -> dict[str, Any]:
    raw = read_column(name, values, None)
    gaps = {"may_be_missing": True} if raw.missing.any() else {}
    if raw.kind == "category":
        return {"name": name, "kind": "category", "categories": sorted(raw.texts), **gaps}
    if raw.kind == "date":
        raise InvalidArgument(f"column {shown(name)} holds dates, which sites cannot agree on yet; leave it out of the table")
    return {"name": name, "kind": "numeric", "range": [float(np.nanmin(raw.values)), float(np.nanmax(raw.values))], **gaps}
