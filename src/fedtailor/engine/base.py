"""Plan (what is run) and Engine (how): the same numbers whichever engine runs the plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import RECEIVED, Algorithm, Round
from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.feed import Feed
from fedtailor.data.split import Split
from fedtailor.errors import Diverged, InvalidArgument
from fedtailor.local.schedule import Schedule
from fedtailor.metrics.cost import Traffic, wire_bytes
from fedtailor.runs.store import Store
from fedtailor.server.crowd import Crowd
from fedtailor.server.reduce import Reduce
from fedtailor.task import Task
from fedtailor.task.device import CPU, backend, moved, size
from fedtailor.task.layers import keyed

Ids = NDArray[np.int64]
NOBODY: Ids = np.zeros(0, np.int64)
ROWS_SHARE = 0.5  # of a device's free memory that the federation's rows may take
NO_ROUND = -1  # the "round" of batches drawn outside the rounds: for personalising


@dataclass(frozen=True, eq=False)
class Plan:
    """A method on a task and a federation; ``weights`` are the p_i, in the federation's order, and sum to one."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    feed: Feed
    weights: NDArray[np.float64]
    later: tuple[Feed, ...] = ()  # where the method is private: the data of a round's second exchange, and so on
    uses: Any = None  # where the method is private: how often it uses its batches (engine/private.py)
    crowd: Crowd | None = None  # where whole clients are private
    attendance: Callable[[int], tuple[Ids, Ids]] | None = None  # where the user says who takes part, and whose upload is lost
    host: Plan | None = None  # the same plan on the CPU, where this one is on another device

    @property
    def device(self) -> torch.device:
        return self.feed.device

    @property
    def on_host(self) -> Plan:
        """The same plan on the CPU: for what is measured, counted or written there."""
        return self if self.host is None else self.host

    def on(self, device: torch.device, task: Task) -> Plan:
        """Return the plan on another device, given its task there; its rows stay on the CPU unless they fit."""
        if device.type == "cpu":
            return self
        federation = self.federation
        splits = [s for s in (federation.train, federation.test, federation.val) if s is not None]
        if size(*(s.x for s in splits), *(s.y for s in splits)) <= ROWS_SHARE * backend(device).free(device):
            federation = federation.to(federation.precision, device)
        feed, *later = (f.like(federation=federation, device=device) for f in (self.feed, *self.later))
        return replace(self, task=task, federation=federation, feed=feed, later=tuple(later), host=self)

    def here(self, branch: Any) -> Any:
        """Return a tree on the device of the plan."""
        return branch if self.host is None else moved(branch, self.device)

    def over(self, federation: Federation) -> Plan:
        """Return the plan on other rows of the same clients, who keep their ranks."""
        federation.__dict__["ranks"] = self.federation.ranks  # in the place of those among themselves
        feed, *later = (feed.like(federation=federation) for feed in (self.feed, *self.later))
        return replace(self, federation=federation, feed=feed, later=tuple(later))

    def reducer(self, shared: Any, rnd: Round) -> Reduce:
        """Return how a round's uploads become one."""
        if self.crowd is not None:
            everyone = self.algorithm.roll_call and rnd.number == 0
            empty = not everyone and not self.crowd.drawn(self.federation.keys, rnd.number).any()
            return self.crowd.mean(rnd.number, rnd.exchange, everyone, empty)
        return self.algorithm.reducer(self.task, shared, rnd)

    @property
    def ranks(self) -> Ids:
        """Every client's place in the canonical order, in the federation's order."""
        return self.federation.ranks

    def lost(self, number: int) -> Ids:
        """Return the clients of a round who train and whose upload does not arrive."""
        if self.attendance is None or (self.algorithm.roll_call and number == 0):
            return NOBODY
        return self.attendance(number)[1]

    def round(self, number: int, rounds: int, ids: Ids, exchange: int = 0, lost: Ids | None = None) -> Round:
        """Return what everyone knows about a round (or one of its exchanges) of the clients ``ids``, whose uploads arrive, and
        of those whose uploads do not."""
        clients, stacked = len(self.federation), self.canonical(ids)
        mass = clients / len(ids) * float(self.weights[ids].sum()) if 0 < len(ids) < clients else 1.0
        cohort = self.weights[stacked]
        weights, ranks = (self.here(torch.from_numpy(part)) for part in (cohort / cohort.sum(), self.ranks[stacked]))
        size = len(ids)
        if self.crowd is not None and not (self.algorithm.roll_call and number == 0):  # how many were drawn is not told
            size, mass = self.crowd.expected, 1.0
        away = self.here(torch.from_numpy(self.ranks[self.canonical(NOBODY if lost is None else lost)]))
        return Round(number, rounds, clients, size, mass, weights, ranks, self.feed.seed, exchange, away)

    def canonical(self, ids: Ids) -> Ids:
        """Return the ids in the order in which uploads are stacked: the same however the federation lists its clients."""
        return ids[np.argsort(self.federation.keys[ids], kind="stable")]

    def key(self, purpose: str, round: int, client: int | None = None, exchange: int = 0) -> int:
        """Return where torch's generator starts for what is done under that name, by a client or by the server."""
        name = 0 if client is None else self.federation.keys[client]
        return int(rng.mix(self.feed.seed, rng.purpose(purpose), np.int64(round), name, exchange))

    def feed_of(self, rnd: Round) -> Feed:
        """Return the data of a round's exchange: always the same rows, under privacy with the earlier ones' uses counted."""
        return self.later[rnd.exchange - 1] if self.later and rnd.exchange else self.feed

    def sent(self, shared: Any, server: Any, rnd: Round) -> Sent:
        """Return what the server sends in a round."""
        if not self.algorithm.has_downlink:
            return Sent(shared)

        def own(ids: Ids | None) -> Any:
            clients = None if ids is None else self.here(torch.from_numpy(self.ranks[ids]))
            return self.algorithm.downlink(self.task, shared, server, clients, rnd)

        return Sent(shared, own)

    def sent_after(self, shared: Any, server: Any, done: int, rounds: int) -> Sent:
        """Return what the server would send after ``done`` rounds, which is what clients are judged with and predict with."""
        if not self.algorithm.has_downlink:
            return Sent(shared)
        return self.sent(shared, server, self.round(done, rounds, np.arange(len(self.federation))))


def _nothing(ids: Ids | None) -> Any:
    return {}


@dataclass(frozen=True, eq=False)
class Sent:
    """A message of the server: ``shared`` to everyone, ``own(ids)`` beside it to these clients only, made when asked for.

    The leaves of ``own(ids)`` are [clients, ...]; ``own(None)`` is for a newcomer, without that axis.
    """

    shared: Any
    own: Callable[[Ids | None], Any] = _nothing

    @cached_property
    def newcomer(self) -> Any:
        """All that a client outside the federation receives: the shared model is what it predicts with."""
        return joined(self.shared, self.own(None))

    def own_of(self, client: int) -> Any:
        """Return what is for one client only."""
        return row(self.own(np.array([client])), 0)

    def to(self, client: int) -> Any:
        """Return all that one client receives."""
        return joined(self.shared, self.own_of(client))

    def on(self, device: torch.device) -> Sent:
        """Return the same on a device."""
        return Sent(moved(self.shared, device), lambda ids: moved(self.own(ids), device))

    def to_newcomers(self) -> Sent:
        """Return what clients of another federation receive, who are all strangers to the server."""
        stranger = self.own(None)

        def own(ids: Ids | None) -> Any:
            return stranger if ids is None else tree.map(lambda leaf: leaf.expand(len(ids), *leaf.shape), stranger)

        return Sent(self.shared, own)


def joined(shared: Any, own: Any) -> Any:
    """Return what a client sees as its ``shared``."""
    return {**shared, **own} if own else shared


class Predictions(NamedTuple):
    """Logits of some clients on a split: [clients, rows, outputs]; ``shared`` is None where there is no shared model, ``facts``
    (see ``Algorithm.diagnose``) unless asked for."""

    ids: Ids
    personal: Tensor
    shared: Tensor | None
    y: Tensor
    mask: Tensor
    facts: Mapping[str, Tensor] | None = None


class Engine(ABC):
    """Runs the client half of a plan. The server half is the same everywhere (``engine.run``).

    ``shared`` is a ``Sent``; the shared tree itself will do where the server sends everyone the same.
    """

    name: str

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.traffic = Traffic()  # of all rounds so far, or since somebody put a new one here

    @abstractmethod
    def round(self, shared: Any, ids: Ids, rnd: Round, store: Store, reduce: Reduce | None = None, lost: Ids = NOBODY) -> Any:
        """Let the clients ``ids`` work, store their personal state, and return their uploads reduced (as the method does).

        The uploads of those who are ``lost`` do not arrive; None is returned where none does.
        """

    @abstractmethod
    def predictions(self, shared: Any, ids: Ids, store: Store, split: Split, diagnose: bool = False) -> Iterator[Predictions]:
        """Yield the predictions of every client, personalised, on its own rows of ``split``; nothing is stored."""

    @abstractmethod
    def on_common(self, shared: Any, ids: Ids, store: Store, x: Tensor) -> Iterator[tuple[Ids, Tensor]]:
        """Yield every client's personal logits on the same rows, [clients, rows, outputs]."""

    def rows(self, split: Split, places: Ids) -> tuple[Tensor, Tensor]:
        """Return the rows of a split that stand at these places: (x, y)."""
        return split.x[places], split.y[places]

    @abstractmethod
    def personal(self, shared: Any, client: int, store: Store) -> Any:
        """Return the tree with which a client predicts now: its stored state (or the one it would be born with), personalised."""

    def personal_chunks(self, shared: Any, store: Store) -> Iterator[tuple[Ids, Any]]:
        """Yield the trees with which all clients predict now, some clients at a time: (ids, leaves [clients, ...])."""
        for client in range(len(self.plan.federation)):
            yield np.array([client]), lift(self.personal(shared, client, store))

    def newborn(self, shared: Any, client: int = 0) -> Any:
        """Return the tree a newcomer predicts with before any local step; what only it received is under ``RECEIVED``.

        Where a method looks at rows first, they are those of ``client``."""
        sent = self.sent(shared)
        with keyed(self.plan.key("newborn", NO_ROUND), self.plan.device):
            return self.out(labelled(born(self.plan, sent.newcomer, client, NO_ROUND), sent.own(None)))

    def sent(self, shared: Any) -> Sent:
        """Return ``shared`` as a ``Sent`` on the device of the plan."""
        if isinstance(shared, Sent):
            return shared if self.plan.host is None else shared.on(self.plan.device)
        if self.plan.algorithm.has_downlink:
            name = type(self.plan.algorithm).__name__
            raise InvalidArgument(
                f"{name} sends its clients different things; give the engine plan.sent(...), not the shared tree"
            )
        return Sent(self.plan.here(shared))

    def out(self, branch: Any) -> Any:
        """Return a tree as it leaves the engine: on the CPU."""
        return branch if self.plan.host is None else moved(branch, CPU)

    def _count_down(self, sent: Sent, ids: Ids) -> None:
        """Count what the clients receive: of one form for all, since what is for one client only is a row of a stack."""
        self.traffic.down += len(ids) * wire_bytes(sent.to(int(ids[0]))) if len(ids) else 0

    def _count_up(self, uploads: Any) -> None:
        """Count what some clients send, leaves [clients, ...]."""
        stacked = tree.leaves(uploads)
        self.traffic.up += len(stacked[0]) * wire_bytes(row(uploads, 0)) if stacked else 0

    def hold(self, store: Store) -> Store:
        """Return the store in which a run is to keep personal states: this one, or one with the same states elsewhere."""
        return store

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """Free what the engine holds (worker processes)."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_finite(self, ids: Sequence[int] | Ids, rnd: Round, **trees: Any) -> None:
        """Raise ``Diverged`` naming the clients whose leaves [clients, ...] are not finite."""
        if all_finite(list(trees.values())):
            return
        for label, branch in trees.items():
            good = torch.ones(len(ids), dtype=torch.bool)
            for leaf in tree.leaves(branch):
                if leaf.is_floating_point():
                    good &= (torch.isfinite(leaf).flatten(1).all(1) if leaf.dim() > 1 else torch.isfinite(leaf)).cpu()
            if not bool(good.all()):
                bad = [self.plan.federation.names[int(ids[i])] for i in (~good).nonzero()[:, 0]]
                raise Diverged(rnd.number, bad, f"the {label}", step_size(self.plan.algorithm, rnd))


def all_finite(branches: Sequence[Any]) -> bool:
    """Return whether all numbers of some trees are finite; False as well where their sums are not. Asks a device once."""
    leaves = [leaf for branch in branches for leaf in tree.leaves(branch) if leaf.is_floating_point()]
    return not leaves or bool(torch.stack([torch.isfinite(leaf.sum()) for leaf in leaves]).all())  # a sum is one quick pass


def step_size(algorithm: Algorithm, rnd: Round) -> float | None:
    """Return the step size of a round (its first, where it changes within the round)."""
    rate = algorithm.lr.at(rnd.number) if isinstance(algorithm.lr, Schedule) else algorithm.lr
    rate = rate(0) if callable(rate) else rate
    return float(rate) if isinstance(rate, int | float) else None


class _Looked(Exception):
    """Somebody looked at a client's data."""


class _Unread:
    """A stand-in for a client's data, for ``init_client``: gathering them is wasted on the many methods that never look."""

    def _refuse(self, *_: Any) -> Any:
        raise _Looked

    __getattr__ = __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = _refuse
    __class__ = property(_refuse)  # asked for by isinstance


UNREAD = _Unread()


def born(plan: Plan, shared: Any, client: int, round: int) -> Any:
    """Return a newcomer's personal state; its data are gathered only if ``init_client`` looks at them."""
    with suppress(Exception):  # whatever else goes wrong does so again below
        return plan.algorithm.init_client(plan.task, shared, UNREAD)
    return plan.algorithm.init_client(plan.task, shared, plan.feed.one(client, round))


def labelled(personal: Any, own: Any) -> Any:
    """Return what a client predicts with beside ``shared`` as one tree: its personal tree, and what was sent to it only."""
    return {**personal, RECEIVED: own} if own else personal


def lift(branch: Any) -> Any:
    """Return one client's tree as a stack of one."""
    return tree.map(lambda leaf: leaf.unsqueeze(0), branch)


def row(branch: Any, i: int) -> Any:
    """Return one client's tree out of a stack."""
    return tree.map(lambda leaf: leaf[i], branch)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, where small models run fastest and sums come out the same everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
