"""What is said about how a table was read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedtailor.data.columns import Floats, Raw
from fedtailor.data.schema import OTHER, Column
from fedtailor.data.tables.codes import at, tally
from fedtailor.data.tables.features import MOST_CATEGORIES
from fedtailor.data.tables.layout import Layout
from fedtailor.data.tables.options import Options
from fedtailor.data.tables.target import Target
from fedtailor.data.words import listed, shown


def task_note(label: str, target: Target, options: Options) -> str:
    """The task, why, and in which units its errors are."""
    head = f"The task is {target.kind}: label {shown(label)}, " + ("as asked" if options.task else f"because {target.why}")
    if target.kind == "classification":
        return f"{head}; {len(target.classes)} classes: {listed(target.classes, 10)}."
    if options.standardize_label:
        return f"{head}; targets are standardised with the pooled training mean and scale, and errors are in those units."
    return f"{head}; targets are kept in their own units."


def class_notes(target: Target, layout: Layout) -> list[str]:
    if target.kind != "classification":
        return []
    trained = np.bincount(target.values[layout.train], minlength=len(target.classes))
    absent = [name for name, count in zip(target.classes, trained, strict=True) if not count]
    return [f"No training row has the class {listed(absent)}; it cannot be learned."] if absent else []


def reasons(left: Mapping[str, str]) -> str:
    return "; ".join(f"{shown(name)}: {why}" for name, why in list(left.items())[:8]) + ("; ..." if len(left) > 8 else "")


def column_notes(columns: Sequence[Column], raws: Mapping[str, Raw], layout: Layout, left: Mapping[str, str]) -> list[str]:
    width = sum(len(column.names()) for column in columns)
    notes = [f"{len(columns)} columns became {width} features: {listed((column.name for column in columns), 20)}."]
    if left:
        notes.append(f"Columns left out: {reasons(left)}.")
    for column in columns:
        raw = raws[column.name]
        if column.kind == "date":
            first = np.datetime64(int(np.floor(column.origin)), "D")
            notes.append(f"Dates in {shown(column.name)} are days since {first}, the earliest in the training rows.")
        elif column.kind == "category":
            notes += _category_notes(column, raw, layout)
        elif _looks_like_a_counter(raw.values):
            notes.append(f"Column {shown(column.name)} grows from row to row; if it only numbers the rows, --drop it.")
    return notes


def _category_notes(column: Column, raw: Raw, layout: Layout) -> list[str]:
    seen = tally(raw.values[layout.train], len(raw.texts)) > 0
    all_seen = tally(at(raw.values, layout.rows), len(raw.texts)) > 0
    name, new = shown(column.name), int((all_seen & ~seen).sum())
    notes = []
    if OTHER in column.categories and int(seen.sum()) > MOST_CATEGORIES:
        notes.append(
            f"{name} has {int(seen.sum()):,} values; the {MOST_CATEGORIES} most frequent are kept, the rest is {OTHER!r}."
        )
    if new:
        fate = f"count as {OTHER!r}" if OTHER in column.categories else "are 0 in all its features"
        notes.append(f"{new:,} values of {name} that no training row has {fate}.")
    return notes


def _looks_like_a_counter(values: Floats) -> bool:
    return len(values) >= 20 and bool((values[1:20] > values[:19]).all()) and bool((np.diff(values) == 1).all())


def scale_note(options: Options) -> str:
    return {
        "pooled": "Numbers and dates are standardised with the mean and scale of all clients' training rows.",
        "client": "Numbers and dates are standardised with each client's own training mean and scale (a newcomer's: the pooled).",
        "none": "Features are not standardised.",
    }[options.standardize]
