"""Where the laws are tried: a small ragged federation, two small models, and the protocol in its plainest form."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.engine.base import Engine, Plan
from fedtailor.engine.run import build_task, cohort_of, make_plan, play, round_of
from fedtailor.runs.store import Store
from fedtailor.task import Task
from fedtailor.theory.rates import resolve

SEED, ROUNDS, BATCH = 3, 3, 5


def federation() -> Federation:
    """Six clients of uneven size (one smaller than a batch, one with a last batch of one row), three classes, a ``lam`` each."""
    draw = np.random.default_rng(11)
    sizes = (11, 4, 12, 6, 9, 12)

    def rows(count: int, client: int) -> tuple[Any, Any]:
        x = draw.normal(size=(count, 4)) + 0.3 * client
        return x, (x @ draw.normal(size=(4, 3)) + 0.5 * draw.normal(size=(count, 3))).argmax(1)

    splits: dict[str, Any] = {
        what: [rows(n if what == "train" else 5, i) for i, n in enumerate(sizes)] for what in ("train", "test", "val")
    }
    names = [f"site {i}" for i in range(len(sizes))]
    public = draw.normal(size=(8, 4))
    made = Federation.from_arrays(**splits, public=public, names=names, task="classification", name="laws")
    return made.with_facts(lam=0.2 + 0.3 * np.arange(len(sizes)))


def network(norm: nn.Module | None = None) -> nn.Module:
    """A small network with everything that makes engines disagree: batch norm (unless ``norm`` is given) and dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 6), norm or nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3))


@dataclass(frozen=True, eq=False)
class Ground:
    """An algorithm on a model, ready to be played."""

    name: str
    plan: Plan

    @staticmethod
    def make(name: str, algorithm: Algorithm, model: str | nn.Module | Task, data: Federation) -> Ground:
        data = data.to(torch.float64)
        task = build_task(model, data, SEED, torch.float64, bias=True)
        algorithm, _ = resolve(algorithm, task, data, rounds=ROUNDS, batch_size=BATCH)
        return Ground(name, make_plan(algorithm, task, data, BATCH, SEED, "size"))

    def using(self, algorithm: Algorithm) -> Ground:
        return Ground(self.name, make_plan(algorithm, self.plan.task, self.plan.federation, BATCH, SEED, "size"))

    def listed(self, order: list[int]) -> Ground:
        """The same clients, listed in another order."""
        data = self.plan.federation.take(order)
        return Ground(self.name, make_plan(self.plan.algorithm, self.plan.task, data, BATCH, SEED, "size"))

    @property
    def cohort(self) -> int:
        clients = len(self.plan.federation)
        return clients if self.plan.algorithm.needs_everyone else max(1, clients * 2 // 3)

    def played(self, engine: Engine, watch: Any = None, cohort: int | None = None) -> dict[str, Any]:
        """All state after the rounds: shared, server, and every client's personal tree by name."""
        shared, server = self.plan.algorithm.init_server(self.plan.task)
        store = Store(len(engine.plan.federation))
        with engine:
            for rnd, now in play(engine, shared, server, store, ROUNDS, cohort or self.cohort, SEED):
                shared, server = now
                if watch is not None:
                    watch(rnd, shared, store)
        return {"shared": shared, "server": server, "personal": everyone(engine.plan, store)}

    def by_the_book(self, apart: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The protocol with no engine: (final state, the trees seen on the way).

        ``apart`` gives the server and every client a copy of the algorithm of its own and lets only bytes pass between.
        """
        plan, task = self.plan, self.plan.task

        def own() -> Algorithm:
            return copy.deepcopy(plan.algorithm) if apart else plan.algorithm

        def send(message: Any) -> Any:
            return tree.unpack(tree.pack(message)) if apart else message

        head, hands = own(), {i: own() for i in range(len(plan.federation))}
        shared, server = head.init_server(task)
        personal: dict[int, Any] = {}
        seen: list[dict[str, Any]] = []
        for number in range(ROUNDS):
            ids = cohort_of(plan.federation, head, self.cohort, SEED, number)
            rnd = round_of(number, ROUNDS, plan, ids)
            ids = ids[np.argsort(plan.federation.keys[ids], kind="stable")]
            reduce = head.reducer(task, shared, rnd)
            state = reduce.start()
            for place, client in enumerate(ids.tolist()):
                data, received = plan.feed.one(client, number), send(shared)
                if client not in personal:
                    personal[client] = hands[client].init_client(task, received, data)
                before = personal[client]
                upload, personal[client] = hands[client].client_update(task, received, before, data, rnd)
                seen.append({"client": client, "round": number, "shared": shared, "server": server})
                seen[-1] |= {"born": before, "upload": upload, "personal": personal[client]}
                stacked = tree.map(lambda leaf: leaf.unsqueeze(0), send(upload))
                weight = torch.tensor([plan.weights[client]])
                state = reduce.add(state, stacked, weight, torch.tensor([place]))
            shared, server = head.server_update(task, shared, server, reduce.finish(state), rnd)
        names = plan.federation.names
        return {"shared": shared, "server": server, "personal": {names[i]: personal[i] for i in sorted(personal)}}, seen


def everyone(plan: Plan, store: Store) -> dict[str, Any]:
    """Stored personal trees by name, of the clients that took part."""
    ids = np.flatnonzero(store.born)
    names = plan.federation.names
    return {names[i]: tree.map(lambda leaf: leaf[0], store.get(np.array([i]))) for i in sorted(ids, key=lambda i: names[i])}
