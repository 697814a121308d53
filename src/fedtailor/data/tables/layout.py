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
from fedtailor.data.tables.codes import at, in_order
from fedtailor.data.tables.draw import draw_all
from fedtailor.data.tables.options import Options
from fedtailor.data.tables.target import Target
from fedtailor.data.tables.threads import each
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

    @cached_property
    def train(self) -> Ints:
        """Rows of the table that are trained on."""
        whole = int(self.rows[-1]) == len(self.rows) - 1  # all rows: each is its own position
        return self.in_training if whole else self.rows[self.in_training]

    @cached_property
    def in_training(self) -> Ints:
        """The same as positions in ``rows``."""
        return np.flatnonzero(self.part == 0)

    def sort(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of ``rows``, sorted by part and client."""
        out = np.empty_like(values)
        out[self.place] = values
        return out

    def splits(self, x: Features, y: NDArray[Any]) -> dict[str, Split]:
        """The parts as views of one block of sorted rows."""
        features, targets = torch.from_numpy(x), torch.from_numpy(y)
        starts = np.cumsum([0] + [int(o[-1]) for o in self.offsets])
        return {
            part: Split(features[a:b], targets[a:b], offsets)
            for part, a, b, offsets in zip(PARTS, starts, starts[1:], self.offsets, strict=False)
        }


def given_parts(column: str, values: pd.Series[Any], rows: Ints, where: Where) -> NDArray[np.int8]:
    """The part of every row of ``rows``, as its split column says."""
    raw = read_column(column, values, "category", where, droppable=False)
    parts = np.array([PART_OF.get(t.strip().lower(), -1) for t in raw.texts] + [-1], np.int8)[raw.values[rows]]
    if (parts < 0).any():
        row = int(rows[np.flatnonzero(parts < 0)[0]])
        value = shown(raw.texts[raw.values[row]]) if raw.values[row] >= 0 else "nothing"
        raise InvalidData(f"the split column {shown(column)} holds {value} in {where(row)}; use train, val or test")
    return parts


def lay_out(owner: Raw, target: Target, rows: Ints, given: NDArray[np.int8] | None, options: Options) -> Layout:
    """Clients in order, their rows in parts: as ``given``, or drawn class by class."""
    codes = at(owner.values, rows)
    counts = np.bincount(codes, minlength=len(owner.texts))
    order, notes = _choose_clients(owner, codes, counts, given, options)
    if len(order) < np.count_nonzero(counts):
        chosen = np.zeros(len(counts), bool)
        chosen[order] = True
        kept = np.flatnonzero(chosen[codes])
        rows, codes, given = rows[kept], codes[kept], None if given is None else given[kept]
    names, sizes = tuple(owner.texts[i] for i in order), counts[order]
    # NumPy sorts 16-bit integers by radix, ten times faster
    number = np.zeros(len(counts), np.uint16 if len(order) <= 2**16 else np.int64)
    number[order] = np.arange(len(order))
    client = number[codes]
    by_client = np.argsort(client, kind="stable")
    if given is None:
        values, strata = target.strata
        part = draw_all(sizes, at(values, rows)[by_client], names, strata, options.shares, options.seed)
    else:
        part = given[by_client]
    parts = [np.flatnonzero(part == which) for which in range(int(part.max()) + 1)]
    place, as_listed = _places(parts, by_client)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    return Layout(names, rows, client, as_listed, place, tuple(np.searchsorted(mine, bounds) for mine in parts), notes)


def _places(parts: Sequence[Ints], by_client: Ints) -> tuple[NDArray[Any], NDArray[np.int8]]:
    """The place of every row in the block of all rows sorted by part and client, and its part, both in the table's order.

    A part is its rows' positions among those sorted by client, so its places are consecutive.
    """
    rows = len(by_client)
    place, part = np.empty(rows, np.int32 if rows < 2**31 else np.int64), np.empty(rows, np.int8)
    starts = np.cumsum([0] + [len(mine) for mine in parts])

    def some(piece: tuple[int, int]) -> None:
        which, first = piece
        found = by_client[parts[which][first : first + BLOCK]]
        place[found] = np.arange(len(found)) + starts[which] + first
        part[found] = which

    each(some, [(which, first) for which, mine in enumerate(parts) for first in range(0, len(mine), BLOCK)], rows)
    return place, part


def _choose_clients(
    owner: Raw, codes: Ints, counts: Ints, given: NDArray[np.int8] | None, options: Options
) -> tuple[list[int], tuple[str, ...]]:
    """The clients that take part, in order; those that cannot are refused, or left out where ``min_samples`` allows it."""
    order = [i for i in in_order(owner.texts) if counts[i]]
    need = len(options.shares) if given is None else 1
    parted = np.ones(len(counts), bool)
    if given is not None:
        parts = (0, 1, 2) if (given == 2).any() else (0, 1)
        parted = np.all([np.bincount(codes[given == part], minlength=len(counts)) > 0 for part in parts], 0)
    notes: tuple[str, ...] = ()
    if options.min_samples is not None:
        least = options.min_samples
        gone = [owner.texts[i] for i in order if counts[i] < least or not parted[i]]
        order = [i for i in order if counts[i] >= least and parted[i]]
        if not order:
            also = " and some in every part" if given is not None else ""
            raise InvalidData(f"no client has {least} rows{also} (the largest has {counts.max()}); use a smaller --min-samples")
        if gone:
            also = " or none in a part" if given is not None else ""
            notes = (f"{len(gone):,} clients with fewer than {least} rows{also} were left out: {listed(gone)}.",)
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
    bare = [owner.texts[i] for i in order if not parted[i]]
    if bare:
        raise InvalidData(
            f"clients without rows in a part: {listed(bare)}; give them some, or use --min-samples 1 to leave them out"
        )
    return order, notes
