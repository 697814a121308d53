"""Plan (what is run) and Engine (how): the same numbers whichever engine runs the plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.data.federation import Federation
from fedtailor.data.feed import Feed
from fedtailor.data.split import Split
from fedtailor.errors import Diverged
from fedtailor.runs.store import Store
from fedtailor.server.reduce import Reduce
from fedtailor.task import Task

Ids = NDArray[np.int64]
NO_ROUND = -1  # the "round" of batches drawn outside the rounds: for personalising


@dataclass(frozen=True, eq=False)
class Plan:
    """A method on a task and a federation; ``weights`` are the p_i, in the federation's order, and sum to one."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    feed: Feed
    weights: NDArray[np.float64]
    uses: Any = None  # where the method is private: how often it uses its batches (engine/private.py)

    def reducer(self, shared: Any, rnd: Round) -> Reduce:
        return self.algorithm.reducer(self.task, shared, rnd)

    def stateless(self) -> bool:
        """No personal state and nothing to personalise: everyone predicts with the shared model."""
        kind = type(self.algorithm)
        return kind.init_client is Algorithm.init_client and not self.personalizes()

    def personalizes(self) -> bool:
        return type(self.algorithm).personalize is not Algorithm.personalize


class Predictions(NamedTuple):
    """Logits of some clients on a split: [clients, rows, outputs]; ``shared`` is None where there is no shared model, ``routes``
    (see ``Algorithm.routes``) unless asked for."""

    ids: Ids
    personal: Tensor
    shared: Tensor | None
    y: Tensor
    mask: Tensor
    routes: Tensor | None = None


class Engine(ABC):
    """Runs the client half of a plan. The server half is the same everywhere (``engine.run``)."""

    name: str

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @abstractmethod
    def round(self, shared: Any, ids: Ids, rnd: Round, store: Store, reduce: Reduce | None = None) -> Any:
        """Local work of the clients ``ids``: stores their personal state, returns the uploads reduced (as the method does)."""

    @abstractmethod
    def predictions(self, shared: Any, ids: Ids, store: Store, split: Split, routes: bool = False) -> Iterator[Predictions]:
        """Every client on its own rows of ``split``, personalised first; nothing is stored."""

    @abstractmethod
    def on_common(self, shared: Any, ids: Ids, store: Store, x: Tensor) -> Iterator[tuple[Ids, Tensor]]:
        """Every client's personal logits on the same rows, [clients, rows, outputs]."""

    @abstractmethod
    def personal(self, shared: Any, client: int, store: Store) -> Any:
        """The tree with which a client predicts now: its stored state (or the one it would be born with), personalised."""

    def newborn(self, shared: Any) -> Any:
        """The tree with which a newcomer predicts before any local step."""
        return born(self.plan, shared, 0, NO_ROUND)

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """Free what the engine holds (worker processes)."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def canonical(self, ids: Ids) -> Ids:
        """The ids in an order that does not depend on how the federation lists its clients."""
        return ids[np.argsort(self.plan.federation.keys[ids], kind="stable")]

    def check_finite(self, ids: Sequence[int] | Ids, rnd: Round, **trees: Any) -> None:
        """Raise ``Diverged`` naming the clients whose leaves [clients, ...] are not finite."""
        for what, branch in trees.items():
            good = torch.ones(len(ids), dtype=torch.bool)
            for leaf in tree.leaves(branch):
                if leaf.is_floating_point() and not bool(torch.isfinite(leaf.sum())):  # a sum is one quick pass
                    good &= torch.isfinite(leaf).flatten(1).all(1) if leaf.dim() > 1 else torch.isfinite(leaf)
            if not bool(good.all()):
                bad = [self.plan.federation.names[int(ids[i])] for i in (~good).nonzero()[:, 0]]
                raise Diverged(rnd.number, bad, f"the {what}")


def born(plan: Plan, shared: Any, client: int, round: int) -> Any:
    """A newcomer's personal state."""
    return plan.algorithm.init_client(plan.task, shared, plan.feed.one(client, round))


def lift(branch: Any) -> Any:
    """One client's tree as a stack of one."""
    return tree.map(lambda leaf: leaf.unsqueeze(0), branch)


def row(branch: Any, i: int) -> Any:
    """One client's tree out of a stack."""
    return tree.map(lambda leaf: leaf[i], branch)


@contextmanager
def one_thread() -> Iterator[None]:
    """Small models run fastest, and sums come out the same everywhere, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
