"""The reference engine: one client after another, or in worker processes with one thread each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.algorithms.base import Round
from fedtailor.data.split import Split
from fedtailor.engine.base import NO_ROUND, Engine, Ids, Plan, Predictions, born, lift, row
from fedtailor.engine.pool import Pool, cores
from fedtailor.runs.store import Store
from fedtailor.server.reduce import Reduce
from fedtailor.tree import leaves

Answer = tuple[Tensor, Tensor | None, Tensor | None]
IMAGES = 128  # predicted at once: convolutions on more are slower for each, and take memory
WORTH_A_POOL = 0.2  # seconds of work left in a round from which worker processes pay


def visit(plan: Plan, shared: Any, client: int, rnd: Round, personal: Any) -> tuple[Any, Any]:
    """A client's part of a round: (upload, personal)."""
    data = plan.feed.one(client, rnd.number)
    if personal is None:
        personal = plan.algorithm.init_client(plan.task, shared, data)
    return plan.algorithm.client_update(plan.task, shared, personal, data, rnd)


def ready(plan: Plan, shared: Any, client: int, personal: Any) -> Any:
    """A client's personal tree, personalised, for predicting."""
    if personal is None:
        personal = born(plan, shared, client, NO_ROUND)
    if plan.personalizes():
        data = plan.feed.one(client, NO_ROUND, "personalize")
        personal = plan.algorithm.personalize(plan.task, shared, personal, data)
    return personal


@torch.no_grad()
def answer(plan: Plan, shared: Any, client: int, personal: Any, x: Tensor, both: bool, routes: bool) -> Answer:
    """(personal logits, shared logits, routes); the shared model is what a newcomer predicts with before any local step."""
    task, algorithm = plan.task, plan.algorithm

    def parted(function: Callable[..., Tensor], state: Any) -> Tensor:
        parts = x.split(IMAGES) if x.dim() > 2 and len(x) > IMAGES else (x,)
        return torch.cat([function(task, shared, state, part) for part in parts])

    mine = ready(plan, shared, client, personal)
    own = parted(algorithm.predict, mine)
    q = parted(algorithm.routes, mine) if routes else None
    if not both or not leaves(shared):
        return own, None, q
    return own, own if plan.stateless() else parted(algorithm.predict, born(plan, shared, client, NO_ROUND)), q


class LoopEngine(Engine):
    """``workers`` processes (None: one, or as many as cores once a round has shown that it pays). No number depends on it."""

    name = "loop"

    def __init__(self, plan: Plan, workers: int | None = None) -> None:
        super().__init__(plan)
        self.workers = workers
        self._pool: Pool | None = None
        if workers is not None and workers > 1:
            self._pool = Pool(plan, workers)

    @property
    def processes(self) -> int:
        return 1 if self._pool is None else self._pool.size

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _stored(self, store: Store, client: int) -> Any:
        return row(store.get(np.array([client])), 0) if store.born[client] else None

    def round(self, shared: Any, ids: Ids, rnd: Round, store: Store, reduce: Reduce | None = None) -> Any:
        ids = self.canonical(ids)
        weights = torch.from_numpy(self.plan.weights[ids])
        reduce = reduce or self.plan.reducer(shared, rnd)
        state = reduce.start()
        for place, (upload, personal) in enumerate(self._visits(shared, ids, rnd, store)):
            one = ids[place : place + 1]
            upload, personal = lift(upload), lift(personal)
            self.check_finite(one, rnd, upload=upload, personal=personal)
            store.put(one, personal)
            state = reduce.add(state, upload, weights[place : place + 1], torch.tensor([place]))
        return reduce.finish(state)

    def _visits(self, shared: Any, ids: Ids, rnd: Round, store: Store) -> Iterator[tuple[Any, Any]]:
        """(upload, personal) of each client, in order."""
        for place, client in enumerate(ids.tolist()):
            if self._pool is not None:
                jobs = ((visit, c, (rnd, self._stored(store, c))) for c in ids[place:].tolist())
                yield from self._pool.run(shared, jobs)
                return
            began = time.perf_counter()
            yield visit(self.plan, shared, client, rnd, self._stored(store, client))
            left = (time.perf_counter() - began) * (len(ids) - place - 1)
            if self.workers is None and left > WORTH_A_POOL and cores() > 1:
                self._pool = Pool(self.plan, cores())

    def _each(self, shared: Any, ids: Ids, store: Store, rows: Any, both: bool, routes: bool = False) -> Iterator[Answer]:
        jobs = ((answer, c, (self._stored(store, c), rows(c), both, routes)) for c in ids.tolist())
        if self._pool is not None:
            yield from self._pool.run(shared, jobs)
            return
        for function, client, arguments in jobs:
            yield function(self.plan, shared, client, *arguments)

    def predictions(self, shared: Any, ids: Ids, store: Store, split: Split, routes: bool = False) -> Iterator[Predictions]:
        for client, (own, common, q) in zip(
            ids.tolist(), self._each(shared, ids, store, lambda c: split.client(c)[0], True, routes), strict=True
        ):
            y = split.client(client)[1]
            mask = torch.ones(1, len(y), dtype=torch.bool)
            more = [None if part is None else part[None] for part in (common, q)]
            yield Predictions(np.array([client]), own[None], more[0], y[None], mask, more[1])

    def on_common(self, shared: Any, ids: Ids, store: Store, x: Tensor) -> Iterator[tuple[Ids, Tensor]]:
        for client, (own, *_) in zip(ids.tolist(), self._each(shared, ids, store, lambda _: x, False), strict=True):
            yield np.array([client]), own[None]

    def personal(self, shared: Any, client: int, store: Store) -> Any:
        return ready(self.plan, shared, client, self._stored(store, client))
