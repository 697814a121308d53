"""Who has which rows, and in which part they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.data.columns import Ints, Raw, read_column
from fedtailor.data.schema import BLOCK, Features
from fedtailor.data.split import Split
from fedtailor.data.tables.codes import in_order, take_rows
from fedtailor.data.tables.draw import draw_all
from fedtailor.data.tables.options import TableOptions
from fedtailor.data.tables.target import Target
from fedtailor.data.tables.threads import parallel_map
from fedtailor.data.words import Where, listed, shown
from fedtailor.errors import InvalidData

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("train", "test", "val")
PART_OF = {"train": 0, "test": 1, "val": 2, "validation": 2}


@dataclass(frozen=True)
class Layout:
    """Which row goes where: ``rows`` of the table in its order, the client and part of each, its ``place`` in the block of all
    rows sorted by part and client, and the offsets of the clients in each part."""

    names: tuple[str, ...]
    rows: Ints
    client: NDArray[Any]
    part: NDArray[np.int8]
    place: NDArray[Any]
    offsets: tuple[Ints, ...]
    notes: tuple[str, ...]
    fit_to: frozenset[str] | None = None

    @cached_property
    def train(self) -> Ints:
        """Rows of the table that are trained on."""
        whole = int(self.rows[-1]) == len(self.rows) - 1  # all rows: each is its own position
        return self.in_training if whole else self.rows[self.in_training]

    @cached_property
    def in_training(self) -> Ints:
        """Positions in ``rows`` of the rows that are trained on."""
        return np.flatnonzero(self.part == 0)

    @cached_property
    def fitted(self) -> Ints:
        """Rows of the table that columns are fitted to: those that the clients ``fit_to`` (None: all) train on."""
        if self.fit_to is None:
            return self.train
        numbers = [i for i, name in enumerate(self.names) if name in self.fit_to]
        return self.rows[self.in_training[np.isin(self.client[self.in_training], numbers)]]

    def sort(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values of ``rows`` sorted by part and client."""
        out = np.empty_like(values)
        out[self.place] = values
        return out

    def splits(self, x: Features, y: NDArray[Any]) -> dict[str, Split]:
        """Return the parts as views of one block of sorted rows."""
        features, targets = torch.from_numpy(x), torch.from_numpy(y)
        starts = np.cumsum([0] + [int(o[-1]) for o in self.offsets])
        rows = self.sort(self.rows)
        return {
            part: Split(features[a:b], targets[a:b], offsets, rows=rows[a:b])
            for part, a, b, offsets in zip(PARTS, starts, starts[1:], self.offsets, strict=False)
        }


def read_parts(column: str, values: pd.Series[Any], rows: Ints, where: Where) -> NDArray[np.int8]:
    """Return the part of every row of ``rows`` that its split column names."""
    raw = read_column(column, values, "category", where, droppable=False)
    parts = np.array([PART_OF.get(t.strip().lower(), -1) for t in raw.texts] + [-1], np.int8)[raw.values[rows]]
    if (parts < 0).any():
        row = int(rows[np.flatnonzero(parts < 0)[0]])
        value = shown(raw.texts[raw.values[row]]) if raw.values[row] >= 0 else "nothing"
        raise InvalidData(f"the split column {shown(column)} holds {value} in {where(row)}; use train, val or test")
    return parts


def lay_out(owner: Raw, target: Target, rows: Ints, known_part: NDArray[np.int8] | None, options: TableOptions) -> Layout:
    """Put the clients in order and their rows in parts: ``known_part``, or parts drawn class by class."""
    codes = take_rows(owner.values, rows)
    counts = np.bincount(codes, minlength=len(owner.texts))
    order, notes = _choose_clients(owner, codes, counts, known_part, options)
    if len(order) < np.count_nonzero(counts):
        chosen = np.zeros(len(counts), bool)
        chosen[order] = True
        kept_rows = np.flatnonzero(chosen[codes])
        rows, codes, known_part = rows[kept_rows], codes[kept_rows], None if known_part is None else known_part[kept_rows]
    names, sizes = tuple(owner.texts[i] for i in order), counts[order]
    # NumPy sorts 16-bit integers by radix, ten times faster
    client_number = np.zeros(len(counts), np.uint16 if len(order) <= 2**16 else np.int64)
    client_number[order] = np.arange(len(order))
    client = client_number[codes]
    by_client = np.argsort(client, kind="stable")
    if known_part is None:
        values, strata = target.strata
        part = draw_all(sizes, take_rows(values, rows)[by_client], names, strata, options.shares, options.seed)
    else:
        part = known_part[by_client]
    parts = [np.flatnonzero(part == k) for k in range(int(part.max()) + 1)]
    place, as_listed = _places(parts, by_client)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    offsets = tuple(np.searchsorted(positions, bounds) for positions in parts)
    return Layout(names, rows, client, as_listed, place, offsets, notes)


def _places(parts: Sequence[Ints], by_client: Ints) -> tuple[NDArray[Any], NDArray[np.int8]]:
    """Return the place of every row in the block of all rows sorted by part and client, and its part, both in the table's order.

    A part is its rows' positions among those sorted by client, so its places are consecutive.
    """
    count, sizes = len(by_client), [len(positions) for positions in parts]
    place, part = np.empty(count, np.int32 if count < 2**31 else np.int64), np.empty(count, np.int8)
    starts = np.cumsum([0, *sizes])

    def fill(piece: tuple[int, int]) -> None:
        k, first = piece
        positions = by_client[parts[k][first : first + BLOCK]]
        place[positions] = np.arange(len(positions)) + starts[k] + first
        part[positions] = k

    pieces = [(k, first) for k, size in enumerate(sizes) for first in range(0, size, BLOCK)]
    parallel_map(fill, pieces, count)
    return place, part


def _choose_clients(
    owner: Raw, codes: Ints, counts: Ints, known_part: NDArray[np.int8] | None, options: TableOptions
) -> tuple[list[int], tuple[str, ...]]:
    """Return the clients that take part, in order; others are refused, or left out where ``min_samples`` allows it."""
    order = [i for i in in_order(owner.texts) if counts[i]]
    need = len(options.shares) if known_part is None else 1
    has_all_parts = np.ones(len(counts), bool)
    if known_part is not None:
        parts = (0, 1, 2) if (known_part == 2).any() else (0, 1)
        has_all_parts = np.all([np.bincount(codes[known_part == part], minlength=len(counts)) > 0 for part in parts], 0)
    notes: tuple[str, ...] = ()
    if options.min_samples is not None:
        least = options.min_samples
        left_out = [owner.texts[i] for i in order if counts[i] < least or not has_all_parts[i]]
        order = [i for i in order if counts[i] >= least and has_all_parts[i]]
        if not order:
            also = " and some in every part" if known_part is not None else ""
            raise InvalidData(f"no client has {least} rows{also} (the largest has {counts.max()}); use a smaller --min-samples")
        if left_out:
            also = " or none in a part" if known_part is not None else ""
            notes = (f"{len(left_out):,} clients with fewer than {least} rows{also} were left out: {listed(left_out)}.",)
    if len(order) == 1:
        only = shown(owner.texts[order[0]])
        raise InvalidData(f"there is one client, {only}; federated learning needs two or more, check --client and --min-samples")
    if counts[order].sum() < 2 * len(order):
        raise InvalidData(
            f"there are {len(order):,} clients in {counts[order].sum():,} rows, almost one per row; check --client, or use "
            f"--min-samples {need} to leave out the small ones"
        )
    small = [owner.texts[i] for i in order if counts[i] < need]
    if small:
        raise InvalidData(
            f"clients with fewer than the {need} rows that {', '.join(PARTS[:need])} need: {listed(small)}; "
            f"use --min-samples {need} to leave them out"
        )
    incomplete = [owner.texts[i] for i in order if not has_all_parts[i]]
    if incomplete:
        raise InvalidData(
            f"clients without rows in a part: {listed(incomplete)}; give them some, or use --min-samples 1 to leave them out"
        )
    return order, notes
