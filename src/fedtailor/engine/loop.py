"""The reference engine: one client after another, or in worker processes with one thread each."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import Round
from fedtailor.data.split import Split
from fedtailor.engine.base import NO_ROUND, NOBODY, Engine, Ids, Plan, Predictions, Sent, born, joined, labelled, lift, row
from fedtailor.engine.pool import TIMEOUT, WorkerPool, cores
from fedtailor.engine.processes import pays
from fedtailor.errors import InvalidArgument
from fedtailor.runs.store import Store
from fedtailor.server.reduce import Reduce
from fedtailor.task.layers import keyed
from fedtailor.tree import leaves

Answer = tuple[Tensor, Tensor | None, dict[str, Tensor] | None]
IMAGES = 128  # predicted at once: convolutions on more are slower for each, and take memory
CROWD = 8  # worker processes for each core, at most
TOGETHER = 1 << 18  # logits of clients that are measured at once, one after another with as many rows


def visit(plan: Plan, common: tuple[Any, Round], client: int, own: Any, personal: Any) -> tuple[Any, Any]:
    """Return (upload, personal) of a client's round, from (shared, round) and what was sent to this client only."""
    shared, rnd = joined(common[0], own), common[1]
    data = plan.feed_of(rnd).one(client, rnd.number)
    with keyed(plan.key("visit", rnd.number, client, rnd.exchange), plan.device):
        if personal is None:
            personal = plan.algorithm.init_client(plan.task, shared, data)
        return plan.algorithm.client_update(plan.task, shared, personal, data, rnd)


def ready(plan: Plan, shared: Any, client: int, personal: Any) -> Any:
    """Return a client's personal tree, personalised, for predicting."""
    with keyed(plan.key("personalize", NO_ROUND, client), plan.device):
        if personal is None:
            personal = born(plan, shared, client, NO_ROUND)
        if plan.algorithm.personalizes:
            data = plan.feed.one(client, NO_ROUND, "personalize")
            personal = plan.algorithm.personalize(plan.task, shared, personal, data)
        return personal


@torch.no_grad()
def answer(
    plan: Plan, common: tuple[Any, Any], client: int, own: Any, personal: Any, x: Tensor, both: bool, diagnose: bool
) -> Answer:
    """Return (personal logits, shared logits, diagnostics), from (shared, a newcomer's part) and this client's own part;
    the shared model is what a newcomer predicts with before any local step."""
    task, algorithm = plan.task, plan.algorithm
    shared, newcomer, x = joined(common[0], own), joined(*common), plan.feed.here(x)

    parts = x.split(IMAGES) if x.dim() > 2 and len(x) > IMAGES else (x,)

    def parted(shared: Any, state: Any) -> Tensor:
        with keyed(plan.key("predict", NO_ROUND, client), plan.device):
            return torch.cat([algorithm.predict(task, shared, state, part) for part in parts])

    mine = ready(plan, shared, client, personal)
    logits, facts = parted(shared, mine), None
    if diagnose:
        each = [algorithm.diagnose(task, shared, mine, part) for part in parts]
        facts = {name: torch.cat([one[name] for one in each]) for name in algorithm.diagnostics}
    if not both or not leaves(newcomer):
        return logits, None, facts
    if algorithm.stateless:
        return logits, logits, facts
    return logits, parted(newcomer, born(plan, newcomer, client, NO_ROUND)), facts


def _affordable(workers: int, clients: int) -> int:
    """Return how many processes to start: not more than there are clients, nor than the cores can give a share of time."""
    most = CROWD * max(1, cores())
    if workers > most:
        started = min(most, clients)
        warnings.warn(f"workers={workers} are more than {cores()} cores can serve; {started} are started", stacklevel=4)
    return min(workers, most, clients)


def _together(group: Sequence[tuple[int, Answer]], split: Split) -> Predictions:
    """Return the answers of clients that have equally many rows as one stack."""
    ids = [client for client, _ in group]
    own, common, facts = zip(*(one for _, one in group), strict=True)
    y = torch.stack([split.client(client)[1].cpu() for client in ids])
    answers = torch.stack(own)
    theirs = None if common[0] is None else answers if common[0] is own[0] else torch.stack(common)
    return Predictions(
        np.array(ids),
        answers,
        theirs,
        y,
        torch.ones(y.shape[:2], dtype=torch.bool),
        None if facts[0] is None else tree.map(lambda *leaves: torch.stack(leaves), *facts),
    )


class LoopEngine(Engine):
    """Visits clients in ``workers`` processes (None: as many as pay, which the first round shows); no number depends on it."""

    name = "loop"

    def __init__(self, plan: Plan, workers: int | None = None, timeout: float = TIMEOUT) -> None:
        super().__init__(plan)
        self.workers, self.timeout = 1 if plan.host is not None else workers, timeout  # workers are on the CPU
        self._pool: WorkerPool | None = None
        if self.workers is not None and self.workers > 1:
            self._pool = WorkerPool(plan, _affordable(self.workers, len(plan.federation)), timeout)

    @property
    def processes(self) -> int:
        return 1 if self._pool is None else self._pool.size

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _stored(self, store: Store, client: int) -> Any:
        return row(store.get(np.array([client])), 0) if store.born[client] else None

    def round(self, shared: Any, ids: Ids, rnd: Round, store: Store, reduce: Reduce | None = None, lost: Ids = NOBODY) -> Any:
        ids, sent = self.plan.canonical(ids), self.sent(shared)
        weights, arrives = torch.from_numpy(self.plan.weights[ids]), ~np.isin(ids, lost)
        order = np.cumsum(arrives) - 1  # places among those that arrive
        reduce = reduce or self.plan.reducer(sent.shared, rnd)
        state = reduce.start()
        self._count_down(sent, ids)
        for place, (upload, personal) in enumerate(self._visits(sent, ids, rnd, store)):
            one = ids[place : place + 1]
            upload, personal = lift(upload), lift(personal)
            self.check_finite(one, rnd, upload=upload, personal=personal)
            store.put(one, personal)
            if arrives[place]:
                self._count_up(upload)
                state = reduce.add(state, upload, weights[place : place + 1], torch.tensor([order[place]]))
        return reduce.finish(state) if arrives.any() else None

    def _visits(self, sent: Sent, ids: Ids, rnd: Round, store: Store) -> Iterator[tuple[Any, Any]]:
        """Yield (upload, personal) of each client, in order."""
        for place, client in enumerate(ids.tolist()):
            if self._pool is not None:
                jobs = ((visit, c, (sent.own_of(c), self._stored(store, c))) for c in ids[place:].tolist())
                yield from self._pool.run((sent.shared, rnd), jobs)
                return
            began = time.perf_counter()
            yield visit(self.plan, (sent.shared, rnd), client, sent.own_of(client), self._stored(store, client))
            if self.workers is None:
                self._start_if_worth(time.perf_counter() - began, len(ids) - place - 1, len(ids) * (rnd.rounds - rnd.number - 1))

    def _start_if_worth(self, seconds: float, here: int, later: int) -> None:
        """Start workers where so many clients are left, in this round and later, that they pay; a client takes ``seconds``."""
        if not pays(seconds * here, seconds * (here + later)):
            return
        try:
            self._pool = WorkerPool(self.plan, cores(), self.timeout)
        except InvalidArgument as error:
            self.workers = 1
            warnings.warn(f"clients are visited in one process: {error}", stacklevel=2)

    def _each(self, shared: Any, ids: Ids, store: Store, rows: Any, both: bool, diagnose: bool = False) -> Iterator[Answer]:
        sent = self.sent(shared)
        jobs = ((answer, c, (sent.own_of(c), self._stored(store, c), rows(c), both, diagnose)) for c in ids.tolist())
        common = sent.shared, sent.own(None)
        if self._pool is not None:
            yield from self._pool.run(common, jobs)
            return
        for function, client, arguments in jobs:
            own, theirs, facts = function(self.plan, common, client, *arguments)
            yield self.out(own), None if theirs is None else self.out(theirs), None if facts is None else self.out(facts)

    def predictions(self, shared: Any, ids: Ids, store: Store, split: Split, diagnose: bool = False) -> Iterator[Predictions]:
        group: list[tuple[int, Answer]] = []
        answers = self._each(shared, ids, store, lambda c: split.client(c)[0], True, diagnose)
        for client, one in zip(ids.tolist(), answers, strict=True):
            logits = one[0]
            if group and (logits.shape != group[0][1][0].shape or (len(group) + 1) * logits.numel() > TOGETHER):
                yield _together(group, split)
                group = []
            group.append((client, one))
        if group:
            yield _together(group, split)

    def on_common(self, shared: Any, ids: Ids, store: Store, x: Tensor) -> Iterator[tuple[Ids, Tensor]]:
        for client, (own, *_) in zip(ids.tolist(), self._each(shared, ids, store, lambda _: x, False), strict=True):
            yield np.array([client]), own[None]

    def personal(self, shared: Any, client: int, store: Store) -> Any:
        sent = self.sent(shared)
        own = sent.own_of(client)
        return self.out(labelled(ready(self.plan, joined(sent.shared, own), client, self._stored(store, client)), own))
