"""Notes for the user on how a table was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.columns import Raw
from fedtailor.data.formats import STYLES, Floats, unsure
from fedtailor.data.schema import OTHER, Column
from fedtailor.data.tables.codes import take_rows, tally
from fedtailor.data.tables.features import MOST_CATEGORIES
from fedtailor.data.tables.layout import Layout
from fedtailor.data.tables.options import TableOptions
from fedtailor.data.tables.target import Target
from fedtailor.data.words import counted, listed, shown

KEYS = 1_000  # rows that are looked at first
FEWEST_KEYS = 50  # rows from which on different numbers mean something
ALMOST_ALL = 0.95  # of the rows have a number of their own
GAPLESS = 0.9  # of the numbers between the smallest and the largest are there


def task_note(label: str, target: Target, options: TableOptions) -> str:
    """Return the task, the reason for it, and the units of its errors."""
    head = f"The task is {target.kind}: label {shown(label)}, " + ("as asked" if options.task else f"because {target.why}")
    if target.kind.softmax:
        return f"{head}; {len(target.classes)} classes: {listed(target.classes, 10)}."
    if options.standardize_label:
        how = "so that the range given becomes -1 to 1" if options.columns else "with the pooled training mean and scale"
        return f"{head}; targets are standardised {how}, and errors are in those units."
    return f"{head}; targets are kept in their own units."


def class_notes(target: Target, layout: Layout) -> list[str]:
    if not target.kind.softmax:
        return []
    trained = np.bincount(target.values[layout.train], minlength=len(target.classes))
    absent = [name for name, count in zip(target.classes, trained, strict=True) if not count]
    return [f"No training row has the class {listed(absent)}; it cannot be learned."] if absent else []


def reasons(left_out: Mapping[str, str]) -> str:
    return "; ".join(f"{shown(name)}: {why}" for name, why in list(left_out.items())[:8]) + ("; ..." if len(left_out) > 8 else "")


def column_notes(columns: Sequence[Column], raws: Mapping[str, Raw], layout: Layout, left_out: Mapping[str, str]) -> list[str]:
    width = sum(len(column.names()) for column in columns)
    became = f"{counted(len(columns), 'column')} became {counted(width, 'feature')}"
    notes = [f"{became}: {listed((column.name for column in columns), 20)}."]
    if left_out:
        notes.append(f"Columns left out: {reasons(left_out)}.")
    for column in columns:
        raw = raws[column.name]
        if raw.style:
            notes.append(_style_note(column.name, raw))
        if column.kind == "date":
            first = np.datetime64(int(np.floor(column.origin)), "D")
            notes.append(f"Dates in {shown(column.name)} are days since {first}, the earliest in the training rows.")
        elif column.kind == "category":
            notes += _category_notes(column, raw, layout)
        elif _looks_like_a_counter(raw.values):
            notes.append(f"Column {shown(column.name)} grows from row to row; if it only numbers the rows, --drop it.")
        elif distinct := _keys(raw.values):
            notes.append(
                f"Column {shown(column.name)} holds {distinct:,} different whole numbers in {len(raw.values):,} rows; if it only "
                "names rows or people, --drop it."
            )
    return notes


def _style_note(name: str, raw: Raw) -> str:
    doubt = " Another reading fits as well; if it is meant, set its style with --columns." if unsure(raw.style, raw.texts) else ""
    return f"In {shown(name)} {STYLES[raw.style].note}.{doubt}"


def _category_notes(column: Column, raw: Raw, layout: Layout) -> list[str]:
    seen = tally(raw.values[layout.train], len(raw.texts)) > 0
    all_seen = tally(take_rows(raw.values, layout.rows), len(raw.texts)) > 0
    name, unseen = shown(column.name), int((all_seen & ~seen).sum())
    notes = []
    if OTHER in column.categories and int(seen.sum()) > MOST_CATEGORIES:
        notes.append(
            f"{name} has {int(seen.sum()):,} values; the {MOST_CATEGORIES} most frequent are kept, the rest is {OTHER!r}."
        )
    if unseen:
        treatment = f"count as {OTHER!r}" if OTHER in column.categories else "are 0 in all its features"
        notes.append(f"{unseen:,} values of {name} that no training row has {treatment}.")
    return notes


def _looks_like_a_counter(values: Floats) -> bool:
    return len(values) >= 20 and bool((values[1:20] > values[:19]).all()) and bool((np.diff(values) == 1).all())


def _keys(values: NDArray[Any]) -> int:
    """Return how many numbers there are, if they look like names of rows or people: whole, and almost all different, or numbered
    without gaps and used less than twice on average; otherwise 0."""
    first = values[:KEYS][np.isfinite(values[:KEYS])]
    if len(values) < FEWEST_KEYS or 2 * len(np.unique(first)) <= len(first) or (first % 1).any():
        return 0
    present = values[np.isfinite(values)]
    if (present % 1).any():
        return 0
    numbers = np.unique(present)
    gapless = len(numbers) >= GAPLESS * (float(numbers[-1]) - float(numbers[0]) + 1) and 2 * len(numbers) > len(present)
    return len(numbers) if gapless or len(numbers) >= ALMOST_ALL * len(present) else 0


def scale_note(options: TableOptions) -> str:
    return {
        "pooled": "Numbers and dates are standardised with the mean and scale of all clients' training rows.",
        "client": "Numbers and dates are standardised with each client's own training mean and scale (a newcomer's: the pooled).",
        "none": "Features are not standardised.",
    }[options.standardize]


def agreed_scale_note(options: TableOptions) -> str:
    """Return how columns whose ranges were given are scaled."""
    if options.standardize == "none":
        return "Features are not standardised."
    return "Numbers and dates are scaled so that their range becomes -1 to 1."
