"""Shards: the clients of a plan, dealt by their names to places that hold their rows and their personal state.

A client's name has a key, a point on a ring of 64 bits, and a shard owns an arc of that ring. One shard more splits one arc in
two and leaves the others alone. Sums over a cohort go in the order of the keys; since arcs are ranges of keys, a sum that is
handed on from arc to arc is taken in the very order of one machine, so that no bit depends on the number of shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import chain
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms import origin
from fedtailor.algorithms.base import Round
from fedtailor.engine.base import Engine, Ids, Plan, Predictions, Sent
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.metrics.cost import Traffic
from fedtailor.runs.store import Store
from fedtailor.server.reduce import Reduce

LEAST, MOST, EACH = 4, 256, 125  # parts of the ring that are computed at once: for so many clients each
Kept = list[tuple[Any, Tensor, Tensor]]  # (uploads [clients, ...], weights, places in the cohort)
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Play runs of the cluster in this process, in one shard, which gives the same bits."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def is_alone() -> bool:
    """Return whether runs of the cluster are to be played in this process."""
    return _ALONE.get()


# -- who is where ------------------------------------------------------------------------------------------------------
def arcs(count: int) -> list[float]:
    """Return where each of ``count`` arcs begins, as shares of the ring, in order; one more splits one of them in two."""
    return sorted(_halving(place) for place in range(count))


def _halving(place: int) -> float:
    """Return 0, 1/2, 1/4, 3/4, 1/8, 5/8, ...: the bits of a number, mirrored at the point."""
    out, step = 0.0, 0.5
    while place:
        out, place, step = out + step * (place & 1), place >> 1, step / 2
    return out


def owners(keys: NDArray[np.uint64], count: int) -> Ids:
    """Return the shard of each client; shards are numbered along the ring."""
    points = (keys >> np.uint64(11)).astype(np.float64) / 2**53
    return (np.searchsorted(np.array(arcs(count)), points, "right") - 1).astype(np.int64)


def parts_of(clients: int) -> int:
    """Return in how many parts of the ring clients are computed at once: a power of two, whatever the number of shards."""
    return int(np.clip(2 ** int(np.log2(max(1, clients // EACH))), LEAST, MOST))


def inner_of(plan: Plan, asked: str | None) -> str:
    """Return the engine that shards run: what was asked for, or vectorized where a gradient is known in closed form."""
    if asked is not None:
        return asked
    return "vectorized" if plan.task.gradient is not None and origin.of(type(plan.algorithm)) is None else "loop"


def part_of(plan: Plan, clients: Ids) -> Plan:
    """Return the plan of some clients, who keep their weights, and their ranks among all."""
    part = plan.over(plan.federation.take(clients))
    part.federation.__dict__["ranks"] = plan.federation.ranks[clients]
    return replace(part, weights=plan.weights[clients], crowd=None, attendance=None)


# -- what is sent ------------------------------------------------------------------------------------------------------
class Box:
    """A tensor on its way, as an array."""

    __slots__ = ("array",)

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array


def packed(value: Any) -> Any:
    """Return a value with its tensors as arrays, which other processes can read where they lie."""
    return _convert(value, lambda leaf: Box(leaf.detach().contiguous().numpy()) if isinstance(leaf, Tensor) else leaf)


def unpacked(value: Any) -> Any:
    """Return what was packed, with tensors of its own."""
    return _convert(value, lambda leaf: torch.from_numpy(leaf.array.copy()) if isinstance(leaf, Box) else leaf)


def on_disk(branch: Any) -> Any:
    """Return a tree whose tensors lie in files without a name, which go with them, and are read when they are needed."""
    return tree.map(_mapped, branch)


def _mapped(leaf: Tensor) -> Tensor:
    if not leaf.numel():
        return leaf
    array = leaf.detach().contiguous().numpy()
    with TemporaryFile() as file:
        kept: NDArray[Any] = np.memmap(file, array.dtype, "w+", shape=array.shape)
    kept[...] = array
    return torch.from_numpy(kept)


def _convert(value: Any, leaf: Any) -> Any:
    if isinstance(value, dict):
        return {name: _convert(part, leaf) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_convert(part, leaf) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(_convert(part, leaf) for part in value)
    if is_dataclass(value) and not isinstance(value, type) and isinstance(value, Order | Asked | Round):
        return replace(value, **{f.name: _convert(getattr(value, f.name), leaf) for f in fields(value)})
    return leaf(value)


@dataclass(frozen=True, eq=False)
class Asked:
    """Some clients of a shard, as it numbers them, and what was sent to each of them only: leaves [clients, ...]."""

    ids: Ids
    own: Any

    def sent(self, shared: Any, newcomer: Any) -> Sent:
        """Return what the server sent, as an engine asks for it."""
        places = {int(client): place for place, client in enumerate(self.ids)}

        def own(ids: Ids | None) -> Any:
            if ids is None:
                return newcomer
            index = torch.tensor([places[int(client)] for client in ids])
            return tree.map(lambda leaf: leaf[index], self.own)

        return Sent(shared, own if tree.leaves(self.own) or tree.leaves(newcomer) else lambda ids: {})


@dataclass(frozen=True, eq=False)
class Order:
    """A shard's part of a round: its clients of the cohort by key, those whose upload is lost, the places of the others in the
    cohort, and the share of its steps that each of its clients manages (None: all)."""

    asked: Asked
    lost: Ids
    places: Ids
    paces: NDArray[np.float64] | None


class Keep(Reduce):
    """Keeps uploads as they come, to be reduced later."""

    def start(self) -> Kept:
        return []

    def add(self, state: Kept, uploads: Any, weights: Tensor, places: Tensor) -> Kept:
        return [*state, (uploads, weights, places)]

    def finish(self, state: Kept) -> Kept:
        return state


# -- what a shard does -------------------------------------------------------------------------------------------------
class Shard:
    """Some clients of a plan, with their rows and personal states; ``parts`` is of the whole ring (see ``parts_of``)."""

    def __init__(self, plan: Plan, inner: str, parts: int) -> None:
        self.plan, self.inner, self.parts = plan, inner, parts
        self.stores: dict[int, Store] = {}
        self._kept: Kept = []
        self._last: tuple[Any, Any] = ({}, None)  # the shared tree and the round of the last order
        self._paces: NDArray[np.float64] | None = None

    @cached_property
    def engine(self) -> Engine:
        """Return what lets the clients work; their rows are read with it, where they are still in files."""
        plan = self.plan if self.plan.federation.shards is None else self.plan.over(self.plan.federation.with_rows())
        for feed in (plan.feed, *plan.later):
            feed.paces = self._paces_of
        return LoopEngine(plan, workers=1) if self.inner == "loop" else VectorizedEngine(plan)

    def _paces_of(self, round: int) -> NDArray[np.float64] | None:
        return self._paces

    def _store(self, number: int) -> Store:
        return self.stores.setdefault(number, Store(len(self.plan.federation)))

    def work(self, common: tuple[Any, Any, Round], number: int, order: Order) -> int:
        """Let the clients of an order work, keep their uploads for ``fold``, and return how many bytes these are."""
        shared, newcomer, rnd = common
        self._last = shared, rnd
        sent, self._paces, self._kept, self.engine.traffic = order.asked.sent(shared, newcomer), order.paces, [], Traffic()
        done = 0
        for ids in self._apart(order.asked.ids):
            lost = order.lost[np.isin(order.lost, ids)]
            places = torch.from_numpy(order.places[done : done + len(ids) - len(lost)])
            done += len(places)
            kept = self.engine.round(sent, ids, rnd, self._store(number), Keep(), lost)
            self._kept += [(uploads, weights, places[some]) for uploads, weights, some in kept or ()]
        self._paces = None
        return self.engine.traffic.up

    def _apart(self, ids: Ids) -> Iterator[Ids]:
        """Yield clients that are computed together: the same whatever the number of shards, as sums then are."""
        if self.inner == "loop":
            yield ids
            return
        part = owners(self.plan.federation.keys[ids], self.parts)
        for number in np.unique(part):
            yield ids[part == number]

    def fold(self, reduce: Reduce | None, state: Any) -> Any:
        """Return a sum (as it was handed on; None at first) with the uploads of the last order added, by the method's own way of
        reducing them unless another is given."""
        reduce = reduce or self.plan.algorithm.reducer(self.plan.task, *self._last)
        state = reduce.start() if state is None else state
        for uploads, weights, places in self._kept:
            state = reduce.add(state, uploads, weights, places)
        return state

    def uploads(self) -> Kept:
        """Return the uploads of the last order themselves."""
        return self._kept

    def predictions(self, common: tuple[Any, Any], number: int, asked: Asked, part: str, diagnose: bool) -> list[Predictions]:
        """Return the clients' predictions on their own rows, as ``Engine.predictions`` yields them."""
        sent, split = asked.sent(*common), getattr(self.engine.plan.federation, part)
        each = (self.engine.predictions(sent, ids, self._store(number), split, diagnose) for ids in self._apart(asked.ids))
        return list(chain.from_iterable(each))

    def on_common(self, common: tuple[Any, Any, Tensor], number: int, asked: Asked) -> list[tuple[Ids, Tensor]]:
        """Return the clients' logits on the same rows."""
        shared, newcomer, x = common
        sent = asked.sent(shared, newcomer)
        each = (self.engine.on_common(sent, ids, self._store(number), x) for ids in self._apart(asked.ids))
        return list(chain.from_iterable(each))

    def rows(self, part: str, clients: Ids, places: Ids) -> tuple[Tensor, Tensor]:
        """Return rows of a split: of each of these clients the one at this place among its own."""
        split = getattr(self.engine.plan.federation, part)
        return self.engine.rows(split, split.offsets[clients] + places)

    def personal(self, common: tuple[Any, Any], number: int, asked: Asked) -> list[Any]:
        """Return the trees with which clients predict now."""
        sent = asked.sent(*common)
        return [self.engine.personal(sent, client, self._store(number)) for client in asked.ids.tolist()]

    def newborn(self, common: tuple[Any, Any], client: int) -> Any:
        """Return the tree a newcomer predicts with, born where one of the clients is."""
        return self.engine.newborn(Asked(np.zeros(0, np.int64), {}).sent(*common), client)

    def put(self, number: int, ids: Ids, personal: Any) -> None:
        """Write personal states into a store."""
        self._store(number).put(ids, personal)

    def get(self, number: int, ids: Ids) -> Any:
        """Return personal states, which were written before."""
        return self._store(number).get(ids)

    def forget(self, number: int) -> None:
        """Drop a store that nobody needs any more."""
        self.stores.pop(number, None)


@dataclass(frozen=True, eq=False)
class Places:
    """The place of every client: its shard, and its number there."""

    shard: Ids
    local: Ids
    members: Sequence[Ids]

    @classmethod
    def of(cls, keys: NDArray[np.uint64], count: int) -> Places:
        """Return the places of clients in at most ``count`` shards; a shard without clients is left out."""
        shard = np.unique(owners(keys, count), return_inverse=True)[1].astype(np.int64)
        members = [np.flatnonzero(shard == number) for number in range(int(shard.max()) + 1)]
        local = np.zeros(len(keys), np.int64)
        for ids in members:
            local[ids] = np.arange(len(ids))
        return cls(shard, local, members)

    def by_shard(self, ids: Ids) -> Mapping[int, Ids]:
        """Return the clients by shard, in the order in which they come."""
        shards = self.shard[ids]
        return {int(number): ids[shards == number] for number in np.unique(shards)}
