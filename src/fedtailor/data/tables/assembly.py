"""A federation from the columns of a table."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.arrays import row_weights
from fedtailor.data.columns import Raw, Table, read_column
from fedtailor.data.federation import Federation
from fedtailor.data.missing import Marked, marked_note, without_marks
from fedtailor.data.schema import Features, Schema
from fedtailor.data.tables.agreed import agreed_classes, agreed_columns, agreed_notes, read_agreed
from fedtailor.data.tables.alike import settled
from fedtailor.data.tables.features import (
    by_client,
    client_moments,
    encode,
    finish_target,
    fit_columns,
    handle_missing,
    read_features,
)
from fedtailor.data.tables.layout import Layout, lay_out, read_parts
from fedtailor.data.tables.notes import agreed_scale_note, class_notes, column_notes, reasons, scale_note, task_note
from fedtailor.data.tables.options import TableOptions
from fedtailor.data.tables.target import Target, read_target
from fedtailor.data.tables.threads import parallel_map
from fedtailor.data.words import Where, listed, shown, text
from fedtailor.errors import InvalidArgument, InvalidData

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Source:
    """A table by column, the owner of each row, its part where that is known, and how to name a row in messages."""

    table: Table
    owner: Raw
    known_part: NDArray[np.int8] | None  # which wins over a split column
    where: Where
    name: str
    recipe: Mapping[str, Any] | None
    client: str = ""  # the column that names the client, if there is one
    marked: Marked = field(default_factory=dict)  # the words that were taken for missing


def unmarked(table: Table, roles: Collection[str | None], options: TableOptions) -> tuple[dict[str, pd.Series[Any]], Marked]:
    """Return the table with its marks for missing values gone, and how often each was there; in the columns of ``roles`` only
    the marks of ``options.na`` count."""
    rows = len(next(iter(table.values()), ()))
    names = list(table)
    cleaned = parallel_map(lambda name: without_marks(table[name], options.na if name in roles else options.marks), names, rows)
    out = {name: values for name, (values, _) in zip(names, cleaned, strict=True)}
    return out, {name: counts for name, (_, counts) in zip(names, cleaned, strict=True) if counts}


def build(source: Source, label: str, options: TableOptions, fit_to: frozenset[str] | None = None) -> Federation:
    """Build the federation of a table: choose rows and clients first, then fit the columns to the training rows (where it is
    given, of the clients ``fit_to``)."""
    table, where = source.table, source.where
    if not table:
        raise InvalidData("the table has no columns; give one with a header")
    agreed = None if options.columns is None else read_agreed(options, label)
    used = _feature_columns(table, source.client, label, options)
    used = used if agreed is None else [column.name for column in agreed.columns]
    if not len(table[label]):
        raise InvalidData("the table has no rows; give one with rows")
    task = options.task if agreed is None else options.task or agreed.task
    target = read_target(label, table[label], task, where, options.merge_labels)
    target = target if agreed is None else agreed_classes(agreed, target, where)
    owner, notes = settled(source.owner, "client", options.merge_clients)
    marked = {name: counts for name, counts in source.marked.items() if name in {*used, source.client, label}}
    notes += [note for note in (marked_note(marked),) if note]
    gaps = {"client": owner.missing, "label": target.missing}
    notes += [f"{int(gap.sum()):,} rows without a {role} were left out." for role, gap in gaps.items() if gap.any()]
    rows = np.flatnonzero(~(owner.missing | target.missing))
    if not len(rows):
        raise InvalidData(f"no row has both a client and the label {shown(label)}; check the two columns")
    if agreed is None:
        raws, left_out = read_features({column: table[column] for column in used}, rows, options, where)
    else:
        raws, left_out = agreed_columns(agreed, table, rows, where), {}
    rows, missing_notes = handle_missing(raws, rows, options.missing, None if agreed is None else agreed.path)
    notes += missing_notes
    layout = replace(lay_out(owner, target, rows, _known_part(source, rows, options), options), fit_to=fit_to)
    columns, constant = fit_columns(raws, layout, options) if agreed is None else (list(agreed.columns), {})
    left_out |= constant
    if not columns:
        raise InvalidData(f"no column can be used as a feature ({reasons(left_out) or 'there is none'}); give other columns")
    y, center, spread = finish_target(label, target, layout, options, None if agreed is None else agreed.label_range)
    moments = client_moments(columns, raws, layout) if options.standardize == "client" else None
    x = encode(columns, [raws[column.name] for column in columns], layout, moments)
    schema = Schema(
        columns=tuple(columns),
        client=source.client,
        label=label,
        kind=target.kind,
        classes=target.classes,
        standardize=options.standardize,
        clients={} if moments is None else by_client(layout.names, moments),
        label_mean=center,
        label_scale=spread,
        marks=options.marks,
        merged_clients=options.merge_clients,
        public=agreed is not None,
    )
    if agreed is None:
        notes += [*column_notes(columns, raws, layout, left_out), scale_note(options)]
    else:
        special = [column for column in (source.client, label, options.split, options.row_weights) if column]
        notes += [*agreed_notes(agreed, table, raws, layout.rows, special), agreed_scale_note(options)]
    made = federation(x, y, target, layout, source.name, schema, source.recipe, task_note(label, target, options), notes)
    return made if options.row_weights is None else _weighted(made, source, options.row_weights)


def _weighted(made: Federation, source: Source, column: str) -> Federation:
    """Return the federation with its training rows weighted by a column of numbers, of which each client has one above 0."""
    raw = read_column(column, source.table[column], "numeric", source.where, droppable=False)
    assert made.train.rows is not None
    weights = raw.values[made.train.rows].astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        row = int(made.train.rows[wrong].min())
        value = "nothing" if raw.missing[row] else shown(text(float(raw.values[row])))
        raise InvalidData(f"the weight {shown(column)} is {value} in {source.where(row)}; give numbers of at least 0")
    per_client = np.split(weights, made.train.offsets[1:-1])
    note = f"Training rows count as {shown(column)} says; measures count all rows alike."
    train = replace(made.train, weights=row_weights(per_client, made.train, made.names))
    return replace(made, train=train, notes=(*made.notes, note))


def _known_part(source: Source, rows: NDArray[np.int64], options: TableOptions) -> NDArray[np.int8] | None:
    """Return the part of each row where a column or the table itself says it."""
    if source.known_part is None and options.split is not None:
        return read_parts(options.split, source.table[options.split], rows, source.where)
    if source.known_part is None:
        return None
    parts = np.zeros(len(source.owner.values), np.int8)  # rows after the last that is known are in nobody's part
    parts[: len(source.known_part)] = source.known_part
    return parts[rows]


def federation(
    x: Features,
    y: NDArray[Any],
    target: Target,
    layout: Layout,
    name: str,
    schema: Schema | None,
    recipe: Mapping[str, Any] | None,
    task: str,
    notes: Sequence[str],
) -> Federation:
    splits = layout.splits(x, y)
    size = f"{len(layout.rows):,} rows of {len(layout.names):,} clients."
    return Federation(
        train=splits["train"],
        test=splits["test"],
        val=splits.get("val"),
        names=layout.names,
        kind=target.kind,
        labels=len(target.classes),
        name=name,
        classes=target.classes,
        schema=schema,
        notes=(size, task, *target.notes, *class_notes(target, layout), *layout.notes, *notes),
        recipe=recipe,
    )


def _feature_columns(table: Table, client: str, label: str, options: TableOptions) -> list[str]:
    """Return the columns to learn from, in the table's order or in that of ``options.features``."""
    roles = {"client": client or None, "label": label, "split": options.split, "weights": options.row_weights}
    special = {role: column for role, column in roles.items() if column is not None}
    for role, column in special.items():
        check_known(table, column, f"{role} column")
    if len(set(special.values())) < len(special):
        twice = next(column for column in special.values() if list(special.values()).count(column) > 1)
        named = " and ".join(role for role, column in special.items() if column == twice)
        raise InvalidArgument(f"the column {shown(twice)} is named as {named} at once; name another column")
    drop = _rejoined(options.drop, table)
    for column in drop:
        check_known(table, column, "column to drop")
    if options.features is None:
        return [column for column in table if column not in special.values() and column not in drop]
    features = _rejoined(options.features, table)
    for column in features:
        check_known(table, column, "feature column")
        for role, other in special.items():
            if column == other:
                raise InvalidArgument(
                    f"column {shown(column)} is the {role} and cannot be a feature too; take it out of features"
                )
    return [column for column in dict.fromkeys(features) if column not in drop]


def _rejoined(names: Sequence[str], table: Table) -> list[str]:
    """Return the names, of which a column's name that was cut at its commas is one again."""
    pieces_of = {column: [piece for part in column.split(",") if (piece := part.strip())] for column in table if "," in column}
    out, left = [], list(names)
    while left:
        whole = next((c for c, pieces in pieces_of.items() if left[: len(pieces)] == pieces and left[0] not in table), left[0])
        out.append(whole)
        del left[: 1 if whole == left[0] else len(pieces_of[whole])]
    return out


def check_known(table: Table, column: str, role: str) -> None:
    if column not in table:
        near = difflib.get_close_matches(str(column), list(table), 1)
        hint = f"did you mean {shown(near[0])}?" if near else f"the columns are {listed(table, 20)}"
        raise InvalidArgument(f"there is no {role} {shown(column)}; {hint}")
