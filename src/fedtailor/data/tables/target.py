"""The label: classes or quantities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.columns import Raw, check_finite, is_text, read_column, read_words
from fedtailor.data.formats import STYLES
from fedtailor.data.tables.alike import settled
from fedtailor.data.tables.codes import in_order, tally
from fedtailor.data.words import Where, shown, text
from fedtailor.errors import InvalidData
from fedtailor.task.kinds import CLASSIFICATION, REGRESSION, Kind, kind_of

if TYPE_CHECKING:
    import pandas as pd

MOST_CLASSES = 20  # a label with more whole numbers than this is taken for a quantity
ROWS_PER_CLASS = 10


@dataclass(frozen=True)
class Target:
    """The label of every row of the table: class numbers or quantities, and whether it is missing."""

    kind: Kind
    values: NDArray[Any]
    missing: NDArray[np.bool_]
    classes: tuple[str, ...]
    why: str
    notes: tuple[str, ...] = ()

    @property
    def strata(self) -> tuple[NDArray[Any], tuple[str, ...]]:
        """The classes, over which a client's split is balanced; a single one for quantities."""
        if self.kind.softmax:
            return self.values, self.classes
        return np.zeros(len(self.values), np.int16), ("",)


def read_target(label: str, values: pd.Series[Any], task: str | None, where: Where, merge: bool = False) -> Target:
    """Read a label as classes or quantities: as ``task`` says, or by what the column looks like. Classes are called as they are
    written; with ``merge``, those that look alike are one."""
    wanted = None if task is None else kind_of(task)
    coded: Raw | None = None
    if wanted is REGRESSION or not is_text(values):
        raw = read_column(label, values, "numeric" if wanted is REGRESSION else None, where, MOST_CLASSES, droppable=False)
    else:
        raw, coded = read_words(label, values, where, MOST_CLASSES)
    missing = raw.missing
    if raw.kind == "date":
        raise InvalidData(f"the label {shown(label)} holds dates; give numbers to predict (for instance days) or classes")
    check_finite(label, raw, where=where, droppable=False)
    present = raw.values[~missing] if missing.any() else raw.values
    if not len(present):
        return Target(CLASSIFICATION, np.zeros(len(missing), np.int64), missing, (), "")
    decimals = raw.kind == "numeric" and values.dtype.kind not in "iu" and bool((present != np.floor(present)).any())
    quantity = wanted is REGRESSION or (decimals and wanted is None)
    if raw.kind == "category" or quantity:
        coded = raw
    elif coded is None:
        coded = read_column(label, values, "category", where, droppable=False)
    notes: list[str] = []
    if coded.kind == "category":
        coded, notes = settled(coded, "label", merge)
    distinct = int(np.count_nonzero(tally(coded.values, len(coded.texts)))) if coded.kind == "category" else 0
    kind, why = (wanted, "as asked") if wanted is not None else _guess(raw.kind, decimals, distinct, len(present))
    if kind.least_squares:
        if present.min() == present.max():
            raise InvalidData(
                f"the label {shown(label)} is {text(present[0])} in every row; there is nothing to predict, check --label"
            )
        written = (f"In the label {shown(label)} {STYLES[raw.style].note}.",) if raw.style else ()
        return Target(kind, raw.values.astype(np.float64, copy=False), missing, (), why, written)
    hint = ", or use --task regression" if raw.kind == "numeric" else ""
    return replace(class_target(f"the label {shown(label)}", coded, why, hint), notes=tuple(notes))


def class_target(subject: str, coded: Raw, why: str, hint: str = "") -> Target:
    """Return a target of class numbers, in the order of the classes' names."""
    missing = coded.missing
    counts = tally(coded.values, len(coded.texts))
    order = [i for i in in_order(coded.texts) if counts[i]]
    classes = tuple(coded.texts[i] for i in order)
    if len(classes) < 2:
        raise InvalidData(f"{subject} is {shown(classes[0])} in every row; there is nothing to predict, check --label")
    if len(classes) > 2 and 2 * len(classes) > counts.sum():
        raise InvalidData(
            f"{subject} has {len(classes):,} classes in {counts.sum():,} rows, too few of each to learn; check --label{hint}"
        )
    number = np.full(len(coded.texts) + 1, -1, np.int16 if len(classes) < 2**15 else np.int64)
    number[order] = np.arange(len(order))
    return Target(CLASSIFICATION, number[coded.values], missing, classes, why)


def _guess(kind: str, decimals: bool, distinct: int, rows: int) -> tuple[Kind, str]:
    """Return the task that a label suggests, and the reason."""
    if kind != "numeric":
        return CLASSIFICATION, "it holds true and false" if kind == "bool" else "it holds words"
    if decimals:
        return REGRESSION, "it holds numbers with decimals"
    if distinct <= 2 or (distinct <= MOST_CLASSES and rows >= ROWS_PER_CLASS * distinct):
        return CLASSIFICATION, f"it holds {distinct} different whole numbers"
    return REGRESSION, f"it holds {distinct:,} different whole numbers in {rows:,} rows"
