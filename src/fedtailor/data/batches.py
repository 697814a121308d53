"""Local work as batches: which rows a client uses in which step, and the batches themselves.

``indices`` decides the rows for many clients at once, from (seed, round, client, phase) alone. ``Batches`` is one
client's work, sliced as it is walked through (loop engine); ``Feed.many`` stacks that of many clients, padded and masked
(vectorized engine). Both carry the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data import rng
from fedtailor.data.augment import Augment
from fedtailor.errors import InvalidArgument

WORDS = 2**22  # random words drawn at a time


@dataclass(frozen=True)
class Work:
    """The amount of work that a client does in one phase of a round: steps, or epochs (passes over its rows).

    ``same_batch`` draws one batch and takes every step on it (CLUP Algorithm 2). ``part`` = (from, to) leaves the phase only that
    share of the client's rows, in an order drawn for the client: (0, 0.3) and (0.3, 1) are disjoint and are all of them. A row
    stays in its part unless ``redraw`` asks for a new order in every round (the same in all phases of the round).
    """

    steps: int | None = None
    epochs: int | None = None
    same_batch: bool = False
    part: tuple[float, float] | None = None
    redraw: bool = False

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise InvalidArgument("local work is given either in steps or in epochs; give exactly one of them")
        if self.same_batch and self.steps is None:
            raise InvalidArgument("same_batch needs the number of steps; give steps=")
        if self.part is not None and not 0 <= self.part[0] < self.part[1] <= 1:
            raise InvalidArgument(f"a part of the rows must be (from, to) with 0 <= from < to <= 1, not {self.part!r}")

    def taking(self, steps: int) -> Self:
        """Return the same work cut (or stretched) to this many steps."""
        return replace(self, steps=steps, epochs=None)

    def bounds(self, sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the part begins and ends in each client's order. A cut inside leaves a row on either side; a client whose
        part would be empty, or that has a single row, keeps all its rows."""
        if self.part is None:
            return np.zeros_like(sizes), sizes
        first, last = (_cut(sizes, share) for share in self.part)
        whole = (sizes < 2) | (first >= last)
        return np.where(whole, 0, first), np.where(whole, sizes, last)

    def rows(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many rows of each client the phase uses."""
        first, last = self.bounds(sizes)
        return last - first

    def count(self, sizes: NDArray[np.int64], batch_size: int | None) -> NDArray[np.int64]:
        """Return the number of steps of each client."""
        per_epoch = np.ones_like(sizes) if batch_size is None else -(-self.rows(sizes) // batch_size)
        return np.full_like(sizes, self.steps) if self.epochs is None else per_epoch * self.epochs


def _cut(sizes: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """Return the number of rows nearest to a share of them (half a row counts as one): some and not all, if the share is."""
    near = np.floor(share * sizes + 0.5).astype(np.int64)
    return near if share in (0, 1) else np.clip(near, 1, np.maximum(sizes - 1, 1))


def indices(
    keys: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    work: Work,
    batch_size: int | None,
    part_keys: NDArray[np.uint64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows used, index [clients, steps, batch] with -1 where there is no row, and the steps of each client.

    ``keys`` holds one word per client, from (seed, round, client, phase). Every epoch is a fresh permutation cut into
    consecutive batches (the last may be shorter). A full batch keeps the natural order. ``part_keys`` holds one word
    per client, for the order that ``work.part`` is a part of.
    """
    if work.part is not None:
        assert part_keys is not None
        inside, counts = indices(keys, work.rows(sizes), replace(work, part=None), batch_size)
        return _among(members(part_keys, sizes, work), inside), counts
    counts = work.count(sizes, batch_size)
    steps, widest = int(counts.max(initial=0)), int(sizes.max(initial=0))
    width = widest if batch_size is None else min(batch_size, widest)
    column = np.arange(width)
    if width == widest and (batch_size is None or int(sizes.max()) <= batch_size):
        rows = np.where(column < sizes[:, None], column, -1)[:, None, :]
        index = np.broadcast_to(rows, (len(sizes), steps, width))
        active = np.arange(steps) < counts[:, None]
        return (index if active.all() else np.where(active[:, :, None], index, -1)), counts
    assert batch_size is not None
    per_epoch = -(-sizes // batch_size)  # batches per epoch
    drawn = 1 if work.same_batch else int(np.max(-(-counts // per_epoch), initial=1))
    order = permutations(keys, sizes, drawn)  # [clients, epochs, widest], -1 past a client's size
    whole = sizes <= batch_size  # a client that is one batch keeps its order, whoever else is in the chunk
    if whole.any():
        natural = np.where(np.arange(widest) < sizes[whole, None], np.arange(widest), -1)
        order[whole] = natural[:, None, :]
    if work.same_batch:
        return np.broadcast_to(order[:, :, :width], (len(sizes), steps, width)), counts
    longest = int(per_epoch.max())
    padded = np.full((len(sizes), drawn, longest * batch_size), -1)
    padded[:, :, :widest] = order
    if (per_epoch == longest).all():
        index = padded.reshape(len(sizes), drawn * longest, batch_size)[:, :steps, :width]
        if (counts == steps).all():
            return index, counts
    step = np.arange(steps)
    epoch, place = step // per_epoch[:, None], step % per_epoch[:, None]  # [clients, steps]
    active = step < counts[:, None]
    start = np.where(active, epoch, 0) * (longest * batch_size) + place * batch_size
    flat = padded.reshape(len(sizes), -1)
    index = np.take_along_axis(flat, (start[:, :, None] + column).reshape(len(sizes), -1), 1).reshape(len(sizes), steps, width)
    return np.where(active[:, :, None], index, -1), counts


def members(keys: NDArray[np.uint64], sizes: NDArray[np.int64], work: Work) -> NDArray[np.int64]:
    """Return the rows of each client's part, [clients, widest part], in their natural order, padded with -1."""
    first, last = work.bounds(sizes)
    order = permutations(keys, sizes, 1)[:, 0]
    place = np.arange(order.shape[1])
    absent = np.iinfo(np.int64).max
    rows = np.sort(np.where((place >= first[:, None]) & (place < last[:, None]), order, absent), 1)
    rows = rows[:, : int((last - first).max(initial=0))]
    return np.where(rows == absent, -1, rows)


def _among(rows: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Turn positions within a part [clients, steps, batch] into rows of the client."""
    same = index.shape[1] > 0 and index.strides[1] == 0
    narrow = index[:, :1] if same else index
    flat = np.take_along_axis(rows, np.maximum(narrow, 0).reshape(len(rows), -1), 1).reshape(narrow.shape)
    return np.broadcast_to(np.where(narrow >= 0, flat, -1), index.shape)


def poisson(
    keys: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    work: Work,
    batch_size: int | None,
    part_keys: NDArray[np.uint64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Like ``indices``, but in every step each row is in the batch with probability q = min(1, batch_size/size), independently.
    Within ``work.part`` these are the rows of the part, and its size.

    Batches vary in size and may be empty: -1 says nothing about whether a step is real, the counts do. The last axis is as wide
    as the largest batch drawn, so none is cut. Rows come in their natural order.
    """
    if work.part is not None:
        assert part_keys is not None
        inside, counts = poisson(keys, work.rows(sizes), replace(work, part=None), batch_size)
        return _among(members(part_keys, sizes, work), inside), counts
    counts = work.count(sizes, batch_size)
    if batch_size is None or (sizes <= batch_size).all():
        return indices(keys, sizes, work, batch_size)
    steps, drawn = int(counts.max(initial=0)), 1 if work.same_batch else int(counts.max(initial=0))
    row = np.arange(int(sizes.max(initial=0)), dtype=np.uint64)
    limit = np.floor(np.minimum(1.0, batch_size / sizes) * 2.0**53).astype(np.uint64)[:, None, None]
    blocks: list[tuple[NDArray[np.int64], ...]] = []
    block = max(1, WORDS // max(1, len(keys) * len(row)))
    for start in range(0, drawn, block):
        step = np.arange(start, min(start + block, drawn), dtype=np.uint64)
        words = rng.mix(rng.mix(keys[:, None], rng.purpose("poisson"), step)[:, :, None], row) >> np.uint64(11)
        chosen = (words < limit) & (row < sizes[:, None, None]) & (step < counts[:, None])[:, :, None]
        who, when, which = np.nonzero(chosen)
        blocks.append((who, when + start, which))
    none = (np.zeros(0, np.int64),) * 3
    who, when, which = (np.concatenate(part) for part in zip(*blocks, strict=True)) if blocks else none
    order = np.lexsort((which, when, who))
    who, when, which = who[order], when[order], which[order]
    cell = who * drawn + when
    width = np.bincount(cell, minlength=len(keys) * drawn)
    place = np.arange(len(cell)) - np.repeat(np.cumsum(width) - width, width)
    index = np.full((len(keys), drawn, max(1, int(width.max(initial=0)))), -1)
    index[who, when, place] = which
    return (np.broadcast_to(index, (len(keys), steps, index.shape[2])) if work.same_batch else index), counts


def permutations(keys: NDArray[np.uint64], sizes: NDArray[np.int64], epochs: int) -> NDArray[np.int64]:
    """Return a permutation of range(size) per client and epoch, [clients, epochs, widest]: rows sorted by random words.

    The row number stands in the low half of its word, so one sort gives the order; past a client's size stands -1.
    """
    widest = int(sizes.max(initial=0))
    row = np.arange(widest, dtype=np.uint64)
    words = rng.mix(rng.mix(keys[:, None], np.arange(epochs))[:, :, None], row)
    words &= np.uint64(0xFFFFFFFF00000000)
    words |= row
    if (sizes != widest).any():
        words[np.broadcast_to(np.arange(widest) >= sizes[:, None, None], words.shape)] = np.uint64(2**64 - 1)
    words.sort(axis=-1)
    order = (words & np.uint64(0xFFFFFFFF)).astype(np.int64)
    order[order == 0xFFFFFFFF] = -1
    return order


def step_keys(keys: NDArray[np.uint64], steps: int) -> NDArray[np.int64]:
    """Return a 64-bit word per client and step, for what is random inside a step (dropout, noise)."""
    return rng.mix(keys[:, None], np.arange(steps), rng.purpose("step")).astype(np.int64)


class Batches(Mapping[str, Any]):
    """One client's batches in one phase. Iterating gives dicts of x, y, key; the last batch is as short as it is.

    As a mapping it shows what a padded client shows: x, y, mask, key with leading axes (steps, batch), ``val`` and the
    further phases a method declared. ``expected`` is the mean size of a batch where batches are Poisson samples; they show it.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        index: NDArray[np.int64],
        keys: NDArray[np.int64],
        more: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        expected: float | None = None,
        weights: Tensor | None = None,
        augment: Augment | None = None,
    ) -> None:
        self._x, self._y, self._index, self._keys = x, y, index, keys
        self._dtype = dtype or (x.dtype if x.is_floating_point() else torch.float32)  # of the mask
        self._more = dict(more or {})
        self._extra = {} if expected is None else {"expected": torch.tensor(expected, dtype=torch.float64)}
        same = len(index) > 0 and (len(index) == 1 or index.strides[0] == 0)
        self._whole = same and np.array_equal(index[0], np.arange(len(y)))
        self._weights, self._augment = weights, augment
        self._views: dict[str, Tensor] = {}

    @property
    def steps(self) -> int:
        return len(self._index)

    @property
    def rows(self) -> Tensor:
        """All features of the client, whichever of them its steps use."""
        return self._x

    def idle(self) -> Batches:
        """Return the same client with no steps to take, in any phase."""
        more = {name: part.idle() if isinstance(part, Batches) else part for name, part in self._more.items()}
        expected = self._extra.get("expected")
        size = None if expected is None else float(expected)
        own = self._weights, self._augment
        return Batches(self._x, self._y, self._index[:0], self._keys[:0], more, self._dtype, size, *own)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        if self._augment is not None or self._weights is not None:
            yield from self._own_batches()
            return
        keys = torch.from_numpy(self._keys)
        if self._whole:  # the same full batch every step: no copy
            for key in keys:
                yield {"x": self._x, "y": self._y, "key": key, **self._extra}
            return
        widths = (self._index >= 0).sum(1)
        index = torch.from_numpy(np.array(self._index)).to(self._x.device)
        for row, width, key in zip(index, widths, keys, strict=True):
            rows = row[:width]
            yield {"x": self._x.index_select(0, rows), "y": self._y.index_select(0, rows), "key": key, **self._extra}

    def _own_batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the same where rows have weights or are augmented."""
        for row, key in zip(self._index, self._keys, strict=True):
            number = row[row >= 0]
            rows = torch.from_numpy(np.array(number)).to(self._x.device)
            batch = {
                "x": self._x.index_select(0, rows),
                "y": self._y.index_select(0, rows),
                "key": torch.tensor(key),
                **self._extra,
            }
            if self._augment is not None:
                batch["x"] = self._augment(batch["x"], np.full(len(number), key), number)
            if self._weights is not None:
                batch["weight"] = self._weights.index_select(0, rows)
            yield batch

    def _rows_of_steps(self, index: Tensor) -> Tensor:
        """Return x [steps, batch, ...], as the steps see it."""
        x = self._x[index.clamp(min=0)]
        if self._augment is None:
            return x
        number = np.maximum(np.array(self._index), 0)
        keys = np.broadcast_to(self._keys[:, None], number.shape)
        return self._augment(x.flatten(0, 1), keys.reshape(-1), number.reshape(-1)).view(x.shape)

    def __getitem__(self, name: str) -> Any:
        if name in self._more:
            return self._more[name]
        if name not in (*self._names, *self._extra):
            raise KeyError(name)
        if name not in self._views:
            index = torch.from_numpy(np.array(self._index)).to(self._x.device)
            self._views[name] = {
                "x": lambda: self._rows_of_steps(index),
                "y": lambda: self._y[index.clamp(min=0)],
                "mask": lambda: (index >= 0).to(self._dtype),
                "key": lambda: torch.from_numpy(self._keys),
                "weight": lambda: self._weights[index.clamp(min=0)],  # type: ignore[index]
                "expected": lambda: self._extra["expected"].expand(len(index)),
            }[name]()
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._names, *self._extra, *self._more))

    def __len__(self) -> int:
        return len(self._names) + len(self._extra) + len(self._more)

    @property
    def _names(self) -> tuple[str, ...]:
        return ("x", "y", "mask", "key") if self._weights is None else ("x", "y", "mask", "key", "weight")
