"""The label: classes or quantities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.columns import Raw, check_finite, read_column
from fedtailor.data.tables.codes import in_order, tally
from fedtailor.data.words import Where, shown, text
from fedtailor.errors import InvalidData

if TYPE_CHECKING:
    import pandas as pd

MOST_CLASSES = 20  # a label with more whole numbers than this is taken for a quantity
ROWS_PER_CLASS = 10


@dataclass(frozen=True)
class Target:
    """The label of every row of the table: class numbers or quantities, and whether it is missing."""

    kind: str
    values: NDArray[Any]
    missing: NDArray[np.bool_]
    classes: tuple[str, ...]
    why: str

    @property
    def strata(self) -> tuple[NDArray[Any], tuple[str, ...]]:
        """What a client's split is balanced over: the classes; nothing for quantities."""
        if self.kind == "classification":
            return self.values, self.classes
        return np.zeros(len(self.values), np.int16), ("",)


def read_target(label: str, values: pd.Series[Any], task: str | None, where: Where) -> Target:
    """Classes or quantities: as told, or by what the column looks like."""
    raw = read_column(label, values, "numeric" if task == "regression" else None, where, MOST_CLASSES, droppable=False)
    missing = raw.missing
    if raw.kind == "date":
        raise InvalidData(f"the label {shown(label)} holds dates; give numbers to predict (for instance days) or classes")
    check_finite(label, raw, where=where, droppable=False)
    present = raw.values[~missing] if missing.any() else raw.values
    if not len(present):
        return Target("classification", np.zeros(len(missing), np.int64), missing, (), "")
    decimals = raw.kind == "numeric" and values.dtype.kind not in "iu" and bool((present != np.floor(present)).any())
    quantity = task == "regression" or (decimals and task is None)
    coded = raw if raw.kind == "category" or quantity else read_column(label, values, "category", where, droppable=False)
    kind, why = (task, "as asked") if task is not None else _guess(raw.kind, decimals, len(coded.texts), len(present))
    if kind == "regression":
        if present.min() == present.max():
            raise InvalidData(
                f"the label {shown(label)} is {text(present[0])} in every row; there is nothing to predict, check --label"
            )
        return Target(kind, raw.values.astype(np.float64, copy=False), missing, (), why)
    hint = ", or use --task regression" if raw.kind == "numeric" else ""
    return class_target(f"the label {shown(label)}", coded, why, hint)


def class_target(what: str, coded: Raw, why: str, hint: str = "") -> Target:
    """Class numbers in the order of the classes' names."""
    missing = coded.missing
    counts = tally(coded.values, len(coded.texts))
    order = [i for i in in_order(coded.texts) if counts[i]]
    classes = tuple(coded.texts[i] for i in order)
    if len(classes) < 2:
        raise InvalidData(f"{what} is {shown(classes[0])} in every row; there is nothing to predict, check --label")
    if len(classes) > 2 and 2 * len(classes) > counts.sum():
        raise InvalidData(
            f"{what} has {len(classes):,} classes in {counts.sum():,} rows, too few of each to learn; check --label{hint}"
        )
    number = np.full(len(coded.texts) + 1, -1, np.int16 if len(classes) < 2**15 else np.int64)
    number[order] = np.arange(len(order))
    return Target("classification", number[coded.values], missing, classes, why)


def _guess(kind: str, decimals: bool, distinct: int, rows: int) -> tuple[str, str]:
    """The task, and why it is taken to be that."""
    if kind != "numeric":
        return "classification", "it holds true and false" if kind == "bool" else "it holds words"
    if decimals:
        return "regression", "it holds numbers with decimals"
    if distinct <= 2 or (distinct <= MOST_CLASSES and rows >= ROWS_PER_CLASS * distinct):
        return "classification", f"it holds {distinct} different whole numbers"
    return "regression", f"it holds {distinct:,} different whole numbers in {rows:,} rows"
