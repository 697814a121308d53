"""What the laws are tried on: a small ragged federation, two small models, and the protocol in its plainest form."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.data.secret import Secret
from fedtailor.engine.base import Engine, Plan
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import Prepared, prepare
from fedtailor.engine.rounds import play
from fedtailor.engine.setup import cohort_of
from fedtailor.runs.store import Store
from fedtailor.task import Task
from fedtailor.task.kinds import CLASSIFICATION

SEED, ROUNDS, BATCH = 3, 3, 5
OPTIONS = Options(rounds=ROUNDS, batch_size=BATCH, seed=SEED, dtype="float64", weights="size")


def federation() -> Federation:
    """Six clients of uneven size (one smaller than a batch, one with a last batch of one row), three classes, a ``lam`` each."""
    draw = np.random.default_rng(11)
    sizes = (11, 4, 12, 6, 9, 12)

    def rows(count: int, client: int) -> tuple[Any, Any]:
        x = draw.normal(size=(count, 4)) + 0.3 * client
        return x, (x @ draw.normal(size=(4, 3)) + 0.5 * draw.normal(size=(count, 3))).argmax(1)

    splits: dict[str, Any] = {
        split: [rows(n if split == "train" else 5, i) for i, n in enumerate(sizes)] for split in ("train", "test", "val")
    }
    names = [f"site {i}" for i in range(len(sizes))]
    public = draw.normal(size=(8, 4))
    data = Federation.from_arrays(**splits, public=public, names=names, task=CLASSIFICATION, name="laws")
    return data.with_facts(lam=0.2 + 0.3 * np.arange(len(sizes)))


def network(norm: nn.Module | None = None) -> nn.Module:
    """Return a small network with everything that makes engines disagree: batch norm (unless ``norm`` is given) and dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 6), norm or nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))


@dataclass(frozen=True, eq=False)
class Case:
    """An algorithm on a model and a federation, ready to be played; what several laws compare with is played once."""

    name: str
    ready: Prepared

    @property
    def plan(self) -> Plan:
        return self.ready.plan

    @staticmethod
    def make(name: str, algorithm: Algorithm, model: str | nn.Module | Task, data: Federation) -> Case:
        return Case(name, prepare(algorithm, data, model, OPTIONS, Secret.from_seed(SEED)))

    def using(self, algorithm: Algorithm) -> Case:
        return Case.make(self.name, algorithm, self.ready.task, self.ready.federation)

    def listed(self, order: list[int]) -> Case:
        """Return the same clients, listed in another order."""
        return Case.make(self.name, self.plan.algorithm, self.ready.task, self.ready.federation.take(order))

    @property
    def cohort(self) -> int:
        clients = len(self.plan.federation)
        return clients if self.plan.algorithm.needs_everyone else max(1, clients * 2 // 3)

    @cached_property
    def reference(self) -> dict[str, Any]:
        """The state after the rounds on the loop engine, in this process."""
        return self.played(LoopEngine(self.plan, workers=1))

    @cached_property
    def book(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """``by_the_book``, with server and clients in one place."""
        return self.by_the_book()

    def played(self, engine: Engine, watch: Any = None, cohort: int | None = None) -> dict[str, Any]:
        """Play the rounds and return the state after them: shared, server, and every client's personal tree by name.

        After each round ``watch`` is given the round, what the server would send (``Sent``) and the store.
        """
        shared, server = self.plan.algorithm.init_server(self.plan.task)
        store = Store(len(engine.plan.federation))
        with engine:
            for rnd, now in play(engine, shared, server, store, ROUNDS, cohort or self.cohort):
                shared, server = now
                if watch is not None:
                    watch(rnd, engine.plan.sent_after(shared, server, rnd.number + 1, ROUNDS), store)
        return {"shared": shared, "server": server, "personal": everyone(engine.plan, store)}

    def by_the_book(self, apart: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Follow the protocol without an engine: (final state, the trees seen on the way).

        ``apart`` gives the server and every client a copy of the algorithm of its own and lets only bytes pass between.
        """
        plan, task = self.plan, self.plan.task

        def algorithm() -> Algorithm:
            return copy.deepcopy(plan.algorithm) if apart else plan.algorithm

        def send(message: Any) -> Any:
            return tree.unpack(tree.pack(message)) if apart else message

        server_side, client_side = algorithm(), {i: algorithm() for i in range(len(plan.federation))}
        shared, server = server_side.init_server(task)
        personal: dict[int, Any] = {}
        seen: list[dict[str, Any]] = []
        for number in range(ROUNDS):
            ids = cohort_of(plan.federation, server_side, self.cohort, SEED, number)
            for exchange in range(server_side.exchanges):
                rnd = plan.round(number, ROUNDS, ids, exchange)
                reduce = server_side.reducer(task, shared, rnd)
                state = reduce.start()
                for place, client in enumerate(plan.canonical(ids).tolist()):
                    downlink = server_side.downlink(task, shared, server, rnd.ranks[place : place + 1], rnd)
                    message = {**shared, **tree.map(lambda leaf: leaf[0], downlink)}
                    data, received = plan.feed_of(rnd).one(client, number), send(message)
                    if client not in personal:
                        personal[client] = client_side[client].init_client(task, received, data)
                    earlier = personal[client]
                    upload, personal[client] = client_side[client].client_update(task, received, earlier, data, rnd)
                    seen.append({"client": client, "round": number, "exchange": exchange, "shared": shared, "server": server})
                    seen[-1] |= {"received": message, "born": earlier, "upload": upload, "personal": personal[client]}
                    stacked = tree.map(lambda leaf: leaf.unsqueeze(0), send(upload))
                    weight = torch.tensor([plan.weights[client]])
                    state = reduce.add(state, stacked, weight, torch.tensor([place]))
                shared, server = server_side.server_update(task, shared, server, reduce.finish(state), rnd)
        names = plan.federation.names
        return {"shared": shared, "server": server, "personal": {names[i]: personal[i] for i in sorted(personal)}}, seen


def everyone(plan: Plan, store: Store) -> dict[str, Any]:
    """Stored personal trees by name, of the clients that took part."""
    ids = np.flatnonzero(store.born)
    names = plan.federation.names
    return {names[i]: tree.map(lambda leaf: leaf[0], store.get(np.array([i]))) for i in sorted(ids, key=lambda i: names[i])}
