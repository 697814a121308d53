"""A federation from the columns of a table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.columns import Raw, Table
from fedtailor.data.federation import Federation
from fedtailor.data.schema import Features, Schema
from fedtailor.data.tables.features import (
    by_client,
    client_moments,
    encode,
    finish_target,
    fit_columns,
    handle_missing,
    read_features,
)
from fedtailor.data.tables.layout import Layout, given_parts, lay_out
from fedtailor.data.tables.notes import class_notes, column_notes, reasons, scale_note, task_note
from fedtailor.data.tables.options import Options
from fedtailor.data.tables.target import Target, read_target
from fedtailor.data.words import Where, listed, shown
from fedtailor.errors import InvalidArgument, InvalidData


@dataclass(frozen=True)
class Source:
    """A table by column, whose row is whose, its part where that is given, and how to speak of a row."""

    table: Table
    owner: Raw
    given: NDArray[np.int8] | None
    where: Where
    name: str
    recipe: Mapping[str, Any] | None
    client: str = ""  # the column that names the client, if there is one


def build(source: Source, label: str, options: Options) -> Federation:
    """The federation of a table: rows and clients first, then what the training rows say of the columns."""
    table, where = source.table, source.where
    if not table:
        raise InvalidData("the table has no columns; give one with a header")
    used = _used(table, source.client, label, options)
    if not len(table[label]):
        raise InvalidData("the table has no rows; give one with rows")
    target = read_target(label, table[label], options.task, where)
    lost = {"client": source.owner.missing, "label": target.missing}
    notes = [f"{int(gap.sum()):,} rows without a {what} were left out." for what, gap in lost.items() if gap.any()]
    rows = np.flatnonzero(~(source.owner.missing | target.missing))
    if not len(rows):
        raise InvalidData(f"no row has both a client and the label {shown(label)}; check the two columns")
    raws, left = read_features({column: table[column] for column in used}, rows, options, where)
    rows, said = handle_missing(raws, rows, options.missing)
    notes += said
    given = source.given
    if options.split is not None:
        given = given_parts(options.split, table[options.split], rows, where)
    elif given is not None:
        given = given[rows]
    layout = lay_out(source.owner, target, rows, given, options)
    columns, constant = fit_columns(raws, layout, options)
    left |= constant
    if not columns:
        raise InvalidData(f"no column can be used as a feature ({reasons(left) or 'there is none'}); give other columns")
    y, center, spread = finish_target(label, target, layout, options)
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
    )
    notes += [*column_notes(columns, raws, layout, left), scale_note(options)]
    return federation(x, y, target, layout, source.name, schema, source.recipe, task_note(label, target, options), notes)


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
        notes=(size, task, *class_notes(target, layout), *layout.notes, *notes),
        recipe=recipe,
    )


def _used(table: Table, client: str, label: str, options: Options) -> list[str]:
    """The columns to learn from, in the table's order or as asked."""
    roles = {"client": client or None, "label": label, "split": options.split}
    special = {role: column for role, column in roles.items() if column is not None}
    for role, column in special.items():
        check_known(table, column, f"{role} column")
    if len(set(special.values())) < len(special):
        raise InvalidArgument(f"the split column {shown(options.split)} is also the client or the label; name another column")
    for column in options.drop:
        check_known(table, column, "column to drop")
    if options.features is None:
        return [column for column in table if column not in special.values() and column not in options.drop]
    for column in options.features:
        check_known(table, column, "feature column")
        for role, other in special.items():
            if column == other:
                raise InvalidArgument(
                    f"column {shown(column)} is the {role} and cannot be a feature too; take it out of features"
                )
    return [column for column in dict.fromkeys(options.features) if column not in options.drop]


def check_known(table: Table, column: str, what: str) -> None:
    if column not in table:
        near = difflib.get_close_matches(str(column), list(table), 1)
        hint = f"did you mean {shown(near[0])}?" if near else f"the columns are {listed(table, 20)}"
        raise InvalidArgument(f"there is no {what} {shown(column)}; {hint}")
