"""Labelled rows of a client that was not there, read as the rows of a run were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.columns import check_finite, columns_of, read_column
from fedtailor.data.missing import MARKS, without_marks
from fedtailor.data.schema import Features, Schema
from fedtailor.data.tables.alike import folded
from fedtailor.data.tables.assembly import check_known
from fedtailor.data.words import listed, row_number, shown, text
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.task.kinds import kind_of

if TYPE_CHECKING:
    import pandas as pd


def client_of(schema: Schema, frame: pd.DataFrame, client: str | None) -> tuple[str, pd.DataFrame]:
    """Return a newcomer's name and its rows: those that name it, or all where the table has no column of clients."""
    if schema.client not in frame.columns:
        if client is None:
            raise InvalidArgument("whose rows are these? give --client NAME")
        return client, frame
    names = frame[schema.client].map(text, na_action="ignore")
    clients = [name for name in dict.fromkeys(names.dropna()) if name.strip()]
    if client is None and len(clients) == 1:
        client = clients[0]
    if client is None:
        have = f"rows of {listed(clients)}" if clients else f"no name in {shown(schema.client)}"
        raise InvalidArgument(f"the table has {have}; say with --client NAME who is new")
    if clients and client not in clients:
        raise InvalidArgument(f"the table has no row of {shown(client)} but of {listed(clients)}; check --client")
    return client, frame[names == client] if clients else frame


def read_newcomer(schema: Schema, frame: pd.DataFrame, merge_labels: bool = False) -> tuple[Features, NDArray[Any], list[str]]:
    """Return features, scaled as everyone's are, and targets of the rows that have a label; and notes on the others."""
    check_known(columns_of(frame), schema.label, "label column")
    numbers = np.asarray(frame.index)

    def where(row: int) -> str:
        return row_number(int(numbers[row]))

    marks = [mark for mark in schema.marks if mark not in MARKS]  # a class may be called NA
    values, _ = without_marks(frame[schema.label], marks)
    if kind_of(schema.kind).softmax:
        raw = read_column(schema.label, values, "category", where, droppable=False)
        place = {name: i for i, name in enumerate(schema.classes)}
        if merge_labels:
            place = {**{folded(name): i for name, i in place.items()}, **place}
        codes = np.array([place.get(t, place.get(folded(t), -1) if merge_labels else -1) for t in raw.texts] + [-1])
        targets = codes[raw.values]
        strange = np.flatnonzero((targets < 0) & ~raw.missing)
        if len(strange):
            value = shown(raw.texts[raw.values[strange[0]]])
            raise InvalidData(
                f"the label {shown(schema.label)} is {value} in {where(int(strange[0]))}, no class of the run "
                f"({listed(schema.classes)}); fix it, or train again with it"
            )
    else:
        raw = read_column(schema.label, values, "numeric", where, droppable=False)
        check_finite(schema.label, raw, where=where, droppable=False)
        targets = (raw.values - schema.label_mean) / schema.label_scale
    rows = np.flatnonzero(~raw.missing)
    if not len(rows):
        raise InvalidData(f"no row has a label in {shown(schema.label)}; label some of them")
    gone = len(frame) - len(rows)
    notes = [f"{gone:,} rows without a label were left out"] if gone else []
    return schema.encode(frame, None, where)[rows], targets[rows], notes
