"""What a method may ask of the protocol: a downlink for each client, several exchanges in a round, uploads in a wire form."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.advisor.card import card
from fedtailor.algorithms import registry
from fedtailor.algorithms.base import RECEIVED
from fedtailor.data.feed import Feed
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.measure import evaluate
from fedtailor.engine.memory import Memory
from fedtailor.engine.setup import build_task, cohort_of, make_plan
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.local import descend, gradient, linear
from fedtailor.metrics.cost import probe, wire_bytes
from fedtailor.runs import models
from fedtailor.runs.store import Store
from fedtailor.server.reduce import Mean
from tests.make import federation, the_round

SIZES = (7, 5, 9, 6, 8)
OPTIONS: dict[str, Any] = {"rounds": 3, "cohort": 0.6, "dtype": "float64", "workers": 1, "seed": 4}


# -- the methods -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Similar(ft.Algorithm):
    """The server sends each client the mean of all clients' last models, weighted by exp(-distance^2) to its own last one."""

    reduce = "stack"

    def init_server(self, task):
        return {}, {}

    def downlink(self, task, shared, server, clients, rnd):
        if not server:
            start = task.init()
            return {"model": start if clients is None else tree.map(lambda leaf: leaf.expand(len(clients), *leaf.shape), start)}
        last, met = server["last"], server["met"]
        if clients is None:
            return {"model": tree.map(lambda leaf: torch.tensordot(met / met.sum(), leaf, 1), last)}
        apart = sum((leaf[clients].unsqueeze(1) - leaf).flatten(2).square().sum(2) for leaf in last.values())
        near = met * torch.exp(-apart * met[clients].unsqueeze(1))  # a client that was never heard of is as near to all
        return {"model": tree.map(lambda leaf: torch.tensordot(near / near.sum(1, keepdim=True), leaf, 1), last)}

    def init_client(self, task, shared, data):
        return {"start": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        return {"model": descend(task.risk, shared["model"], data, self.optimizer(rnd))}, personal

    def server_update(self, task, shared, server, upload, rnd):
        if not server:
            empty = tree.map(lambda leaf: leaf.new_zeros(rnd.clients, *leaf.shape[1:]), upload["model"])
            server = {"last": empty, "met": next(iter(empty.values())).new_zeros(rnd.clients)}
        last = tree.map(lambda old, new: old.index_copy(0, rnd.ranks, new), server["last"], upload["model"])
        return shared, {"last": last, "met": server["met"].index_fill(0, rnd.ranks, 1.0)}

    def predict(self, task, shared, personal, x):
        return task.apply(tree.mix(shared["model"], personal["start"], 0.25), x)


@dataclass(frozen=True, kw_only=True)
class Corrected(ft.Algorithm):
    """First everybody sends a gradient, then all descend with their own replaced by the mean in the first order."""

    exchanges = 2

    def init_server(self, task):
        start = task.init()
        return {"model": start, "slope": tree.zeros(tree.trainable(start))}, {}

    def init_client(self, task, shared, data):
        return {"slope": tree.zeros(shared["slope"])}

    def client_update(self, task, shared, personal, data, rnd):
        w = shared["model"]
        if rnd.exchange == 0:
            slope = tree.trainable(gradient(task.risk, w, data))
            return {"slope": slope}, {"slope": slope}
        bend = linear(tree.sub(shared["slope"], personal["slope"]))
        return {"delta": tree.sub(descend(task.risk, w, data, self.optimizer(rnd), bend), w)}, personal

    def server_update(self, task, shared, server, upload, rnd):
        if rnd.exchange == 0:
            return {**shared, "slope": upload["slope"]}, server
        return {**shared, "model": tree.add(shared["model"], upload["delta"])}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)


@dataclass(frozen=True, kw_only=True)
class Twice(ft.FedAvg):
    """Two FedAvg rounds on the same data in one."""

    exchanges = 2


class Decoded(Mean):
    def add(self, state, uploads, weights, places):
        return super().add(state, tree.map(torch.Tensor.double, uploads), weights, places)


@dataclass(frozen=True, kw_only=True)
class Halved(ft.Algorithm):
    """Another method, its uploads in half precision on the wire; its facts are the other's."""

    method: ft.Algorithm = field(default_factory=ft.FedAvg)

    exchanges = property(lambda self: self.method.exchanges)
    roll_call = property(lambda self: self.method.roll_call)
    needs_everyone = property(lambda self: self.method.needs_everyone)
    reads_rows = property(lambda self: self.method.reads_rows)
    leak = property(lambda self: self.method.leak)
    stateless = property(lambda self: self.method.stateless)
    personalizes = property(lambda self: self.method.personalizes)
    has_downlink = property(lambda self: self.method.has_downlink)

    def work(self):
        return self.method.work()

    def reducer(self, task, shared, rnd):
        return Decoded()

    def downlink(self, task, shared, server, clients, rnd):
        return self.method.downlink(task, shared, server, clients, rnd)

    def init_server(self, task):
        return self.method.init_server(task)

    def init_client(self, task, shared, data):
        return self.method.init_client(task, shared, data)

    def client_update(self, task, shared, personal, data, rnd):
        upload, personal = self.method.client_update(task, shared, personal, data, rnd)
        return tree.map(torch.Tensor.half, upload), personal

    def server_update(self, task, shared, server, upload, rnd):
        return self.method.server_update(task, shared, server, upload, rnd)

    def personalize(self, task, shared, personal, data):
        return self.method.personalize(task, shared, personal, data)

    def predict(self, task, shared, personal, x):
        return self.method.predict(task, shared, personal, x)


def plan_of(method, sizes=SIZES, seed=4, weights="uniform", batch_size=None, model="linear", dtype=torch.float64):
    fed = federation(sizes).to(dtype)
    return make_plan(method, build_task(model, fed, seed, dtype, bias=True), fed, batch_size, seed, weights)


# -- rounds ------------------------------------------------------------------------------------------------------------
def test_a_round_says_all_of_itself():
    with pytest.raises(TypeError):
        ft.Round(number=1, seed=3)


def test_ranks_follow_the_clients_however_they_are_listed_and_stand_as_uploads_are_stacked():
    plan = plan_of(ft.FedAvg())
    turned = replace(plan, federation=plan.federation.take([3, 1, 4, 0, 2]))
    ids = np.array([4, 0, 2])
    names = [plan.federation.names[i] for i in ids]
    there = np.array([turned.federation.names.index(name) for name in names])
    here = plan.round(0, 1, ids)
    assert torch.equal(here.ranks, turned.round(0, 1, there).ranks)
    stacked = plan.canonical(ids)
    assert here.ranks.tolist() == plan.ranks[stacked].tolist() == sorted(here.ranks.tolist())


@pytest.mark.parametrize("rounds", range(1, 7))
def test_l2gd_gives_newcomers_the_coin_of_the_runs_seed(rounds):
    """At the end x is the mean: averaging leaves a newcomer there, a step does not; which of the two, the seed says."""
    run = ft.run(ft.L2GD(p=0.5), federation(SIZES), new_clients=0.4, rounds=rounds, seed=5, dtype="float64", engine="loop")
    averages = the_round(number=rounds, seed=5).uniform("L2GD") < 0.5
    store = run.outside[1]
    stays = all(torch.equal(store.get(np.array([i]))["model"][k][0], v) for i in range(2) for k, v in run.shared["model"].items())
    assert stays == averages


# -- a downlink for each client ----------------------------------------------------------------------------------------
def softmax_step(w, x, y, lr):
    z = np.hstack([x, np.ones((len(x), 1))])
    p = np.exp(z @ w.T - (z @ w.T).max(1, keepdims=True))
    p = p / p.sum(1, keepdims=True) - np.eye(len(w))[y.astype(int)]
    return w - lr * p.T @ z / len(x)


def sent_by_hand(last, client):
    """Of the clients that were heard of."""
    others = sorted(last)
    near = [np.exp(-((last[client] - last[o]) ** 2).sum()) if client in last else 1.0 for o in others]
    return sum(n * last[o] for n, o in zip(near, others, strict=True)) / sum(near)


def flat(model):
    return torch.cat([model["weight"], model["bias"][..., None]], -1).numpy()


@pytest.mark.parametrize("engine", ["loop", "vectorized", "workers"])
def test_similar_against_numpy(engine):
    plan = plan_of(Similar(lr=0.3, steps=2))
    fed = plan.federation
    options = {
        **OPTIONS,
        "rounds": 2,
        "cohort": 2,
        "engine": "loop" if engine == "workers" else engine,
        "workers": 2 if engine == "workers" else 1,
    }
    run = ft.run(Similar(lr=0.3, steps=2), fed, **options)
    start = flat(plan.task.init())
    last: dict[int, Any] = {}
    births: dict[int, Any] = {}
    for number in range(2):
        new = {}
        for i in cohort_of(fed, plan.algorithm, 2, 4, number).tolist():
            w = sent_by_hand(last, i) if last else start
            births.setdefault(i, w)
            x, y = (part.numpy() for part in fed.train.client(i))
            new[i] = softmax_step(softmax_step(w, x, y, 0.3), x, y, 0.3)
        last |= new
    x = fed.test.client(0)[0]
    z = np.hstack([x.numpy(), np.ones((len(x), 1))])
    assert len(births) < 5  # somebody was never there
    for i in range(5):
        w = sent_by_hand(last, i)
        own = 0.75 * w + 0.25 * births.get(i, w)
        assert np.allclose(run.predict(i, x).numpy(), z @ own.T, rtol=1e-9)
        assert np.allclose(flat(run.personal[i][RECEIVED]["model"]), w, rtol=1e-9)
        y, rows = fed.test.client(i)[1].numpy(), np.hstack([fed.test.client(i)[0].numpy(), np.ones((4, 1))])
        assert run.clients["acc_personal"][i] == np.mean((rows @ own.T).argmax(1) == y)
    mean = sum(last.values()) / len(last)
    assert np.allclose(run.predict_global(x).numpy(), z @ mean.T, rtol=1e-9)
    message = wire_bytes({"model": plan.task.init()})
    assert run.summary["bytes_down"] == run.summary["bytes_up"] == 2 * 2 * message


def test_newcomers_receive_what_is_for_strangers_and_work_on_it():
    run = ft.run(Similar(lr=0.3), federation(SIZES), new_clients=0.4, engine="loop", **OPTIONS)
    names = run.engine.plan.federation.names
    strangers = [i for i, name in enumerate(run.federation.names) if name not in names]
    met = run.server["met"]
    for i in strangers:
        for name, leaf in run.server["last"].items():
            assert torch.allclose(run.personal[i][RECEIVED]["model"][name], torch.tensordot(met / met.sum(), leaf, 1))
    assert run.summary["new_clients"] == 2


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_tailored_run_is_resumed_saved_and_predicts_from_its_directory(tmp_path, monkeypatch, engine):
    monkeypatch.setitem(registry, "Similar", Similar)
    options = {**OPTIONS, "rounds": 4, "engine": engine, "checkpoint_every": 1}
    data = federation(SIZES, names=[f"site {i}" for i in range(5)])
    whole = ft.run(Similar(), data, out=tmp_path / "whole", **options)

    def stop(record):
        if record["round"] == 2:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        ft.run(Similar(), data, out=tmp_path / "run", callback=stop, **options)
    run = ft.run(Similar(), data, out=tmp_path / "run", resume=True, **options)
    assert (tmp_path / "run/history.jsonl").read_text() == (tmp_path / "whole/history.jsonl").read_text()
    saved, x = models.read(tmp_path / "run"), data.test.client(0)[0]
    for i, name in enumerate(data.names):
        assert torch.equal(run.predict(i, x), whole.predict(i, x))
        assert torch.equal(saved.predict(name, x), run.predict(i, x))
    assert torch.equal(saved.predict(None, x), run.predict_global(x))
    assert torch.equal(saved.weights(None)["weight"], run.state_dict()["weight"])


def test_a_shared_tree_alone_is_refused_where_clients_receive_different_things():
    plan = plan_of(Similar())
    with pytest.raises(ft.errors.InvalidArgument, match="different things"):
        LoopEngine(plan, workers=1).round({}, np.arange(2), plan.round(0, 1, np.arange(2)), Store(5))


# -- several exchanges -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_corrected_against_numpy(engine):
    plan = plan_of(Corrected(lr=0.2, steps=3))
    fed = plan.federation
    run = ft.run(Corrected(lr=0.2, steps=3), fed, engine=engine, **OPTIONS)
    w = flat(plan.task.init())
    for number in range(3):
        ids = cohort_of(fed, plan.algorithm, 3, 4, number).tolist()
        rows = {i: tuple(part.numpy() for part in fed.train.client(i)) for i in ids}
        slopes = {i: w - softmax_step(w, *rows[i], 1.0) for i in ids}
        mean, ends = sum(slopes.values()) / 3, []
        for i in ids:
            v = w
            for _ in range(3):
                v = softmax_step(v, *rows[i], 0.2) - 0.2 * (mean - slopes[i])
            ends.append(v)
        w = sum(ends) / 3
    assert np.allclose(flat(run.shared["model"]), w, rtol=1e-9)
    shared, _ = plan.algorithm.init_server(plan.task)
    slope, model = ({key: {"weight": shared["model"]["weight"], "bias": shared["model"]["bias"]}} for key in ("slope", "delta"))
    assert probe(plan)["bytes_down"] == 2 * wire_bytes(shared)
    assert probe(plan)["bytes_up"] == wire_bytes(slope) + wire_bytes(model)
    assert run.summary["bytes_up"] == 3 * 3 * probe(plan)["bytes_up"]


def test_privacy_charges_for_every_exchange_with_noise_of_its_own():
    secret = ft.Private(clip=1.0, noise=2.0, seed=1)
    once, twice = (
        ft.run(kind(opt=secret), federation(SIZES), rounds=rounds, engine="loop", workers=1)
        for kind, rounds in ((ft.FedAvg, 4), (Twice, 2))
    )
    assert twice.summary["epsilon"] == pytest.approx(once.summary["epsilon"], rel=1e-9)
    plan = plan_of(Twice(opt=ft.Private(clip=1.0, noise=1e4, seed=1), lr=1.0, steps=1))
    start, ids = plan.algorithm.init_server(plan.task)[0], np.arange(5)
    for engine in (LoopEngine(plan, workers=1), VectorizedEngine(plan)):
        first, second = (engine.round(start, ids, plan.round(0, 1, ids, exchange), Store(5)) for exchange in (0, 1))
        noise = [torch.cat([leaf.flatten() for leaf in tree.leaves(upload)]) for upload in (first, second)]
        assert float((noise[0] - noise[1]).abs().min()) > 1.0  # all noise, of deviation 1e4 over the rows: never the same twice


@pytest.mark.parametrize("method", [Similar(), Corrected(), Halved(method=ft.Ditto())], ids=lambda m: type(m).__name__)
def test_the_ten_laws(method):
    kept = ft.check_algorithm(method)
    assert {(v.number, v.model) for v in kept} == {(n, model) for n in range(1, 11) for model in ("linear", "network")}


def test_cards_count_what_each_client_receives_in_all_exchanges():
    similar, corrected = card(Similar()), card(Corrected())
    assert similar.sent_down.branches == ("model",)
    assert similar.sent_down.models == similar.sent_up.models == 1.0
    assert similar.works_for_new_client
    assert not similar.loop_only
    assert corrected.sent_up.branches == ("slope", "delta")
    assert corrected.sent_down.parameters == 2 * corrected.sent_up.parameters  # both times the model and the mean's slope


# -- a method around another -------------------------------------------------------------------------------------------
def test_a_wrapper_counts_the_bytes_of_the_wire_form_and_keeps_the_facts_of_the_method():
    for method in (ft.FedAvg(), ft.Ditto(), Corrected()):
        plain, thin = (plan_of(m) for m in (method, Halved(method=method)))
        upload = probe(plain)["bytes_up"], probe(thin)["bytes_up"]
        numbers = sum(leaf.numel() for leaf in tree.leaves(plain.task.init())) * method.exchanges
        assert upload[0] - upload[1] == pytest.approx(6 * numbers, abs=16 * method.exchanges)  # 8 bytes a number, then 2
        assert probe(thin)["bytes_down"] == probe(plain)["bytes_down"]
        runs = [ft.run(p.algorithm, p.federation, engine="vectorized", **OPTIONS) for p in (plain, thin)]
        assert runs[0].summary["loss_personal"] == pytest.approx(runs[1].summary["loss_personal"], rel=1e-2)
        assert runs[0].shared["model"]["weight"].dtype == runs[1].shared["model"]["weight"].dtype


# -- what it costs -----------------------------------------------------------------------------------------------------
def test_a_rounds_weights_pass_to_workers_through_shared_memory():
    rnd = the_round(weights=torch.arange(10_000.0), ranks=torch.arange(10_000))
    memory = Memory()
    message = memory.write(({"a": torch.ones(3)}, rnd))
    assert len(pickle.dumps(message)) < 2_000
    _, back = memory.read(message, copy=True)
    memory.close()
    assert torch.equal(back.weights, rnd.weights)
    assert torch.equal(back.ranks, rnd.ranks)
    assert back.seed == rnd.seed


@pytest.mark.parametrize("kind", [LoopEngine, VectorizedEngine])
def test_evaluation_gathers_batches_only_for_a_method_that_looks_at_them_when_born(kind, monkeypatch):
    plans = plan_of(ft.FedCLUP(), batch_size=3), plan_of(ft.AL2SGD(mu=0.1, smoothness=10.0), batch_size=3)
    gathered: list[str] = []
    for name in ("one", "many"):
        real = getattr(Feed, name)
        monkeypatch.setattr(Feed, name, lambda *args, real=real, name=name, **kw: gathered.append(name) or real(*args, **kw))
    for plan, looks in zip(plans, (False, True), strict=True):
        shared, _ = plan.algorithm.init_server(plan.task)
        gathered.clear()
        evaluate(kind(plan), shared, Store(5))
        assert bool(gathered) == looks
