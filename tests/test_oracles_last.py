"""FedBN, PartialFed and FedCLUPDynamic against their NumPy transcriptions: float64, both engines, to 1e-9."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.data.batches import step_keys
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.run import build_task, cohort_of, make_plan, play
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.runs.store import Store
from tests.make import seeded
from tests.oracles import partialfed
from tests.oracles.fedbn import gradient, predict
from tests.oracles.fedbn import risk as network_risk
from tests.test_oracles_more import data, flat, softmax_gradient
from tests.test_oracles_more import risk as linear_risk

D, K, ROUNDS, SEED, TOLERANCE = 3, 3, 6, 4, 1e-9
# batch, clients of a round, weights. A client of eleven rows has a last batch of one row, and none has one of two: a norm
# makes of two rows little more than the sign of their difference, and rounding errors grow a hundred thousandfold in six rounds
SETTINGS = [(None, 4, "uniform"), (None, 3, "size"), (5, 3, "uniform"), (5, 4, "size")]
# both branches of the temperature are walked in ROUNDS rounds, and logits that move far make the choices differ
CHOICE = {"lr": 0.3, "logit_lr": 2.0, "temperature": 2.0, "cooling": 0.6, "coldest": 0.5}
# lam rises to the ceiling in ten rounds, and validation falls again after a rise
RISING = {"lr": 0.5, "lam": 0.05, "factor": 3.0, "patience": 2, "ceiling": 0.4, "tolerance": 0.01}

# name -> (method, module of the oracle, what the oracle is told)
CASES = {
    "FedBN": (ft.FedBN(lr=0.3), "fedbn", {"lr": 0.3}),
    "PartialFed": (ft.PartialFed(**CHOICE), "partialfed", CHOICE),
    "FedCLUPDynamic": (ft.FedCLUPDynamic(**RISING), "fedclup_dynamic", RISING),
}


def normed():
    """Two batch norms, their affine parameters away from one and zero."""
    net = nn.Sequential(
        nn.Linear(D, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, K)
    )
    for norm in (net[1], net[4]):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    return net


MODELS = {"linear": lambda: "linear", "mlp": lambda: "mlp:6,5", "normed": lambda: seeded(normed)}


def validation():
    draw = np.random.default_rng(11)
    return [(draw.normal(size=(n, D)) + 0.4 * i, draw.integers(0, K, n)) for i, n in enumerate((6, 3, 8, 5))]


def prepared(method, model, batch, weights):
    """The clients' rows and the plan: three full-batch steps, or two epochs, which are not as many steps for everyone."""
    clients = data()
    val = validation() if isinstance(method, ft.FedCLUPDynamic) else None
    federation = ft.Federation.from_arrays(clients, clients, val=val).to(torch.float64)
    method = replace(method, **({"steps": 3} if batch is None else {"epochs": 2}))
    task = build_task(MODELS[model](), federation, 0, torch.float64, bias=True)
    return clients, make_plan(method, task, federation, batch, SEED, weights)


def follow(oracle, plan, clients, start, grad, told, size, rounds=ROUNDS):
    return import_module(f"tests.oracles.{oracle}").run(
        grad,
        clients,
        start,
        rounds=rounds,
        batches=lambda t, i, phase: plan.feed.rows(i, t, phase),
        cohorts=lambda t: cohort_of(plan.federation, plan.algorithm, size, SEED, t).tolist(),
        weights=plan.weights,
        **told,
    )


def trajectory(kind, plan, size, probe, rounds=ROUNDS):
    """After each round: the shared tree, every client's logits on ``probe``, the store and the server's tree."""
    engine = kind(plan, **({"workers": 1} if kind is LoopEngine else {}))
    shared, server = plan.algorithm.init_server(plan.task)
    store = Store(len(plan.federation))
    ids = np.arange(len(plan.federation))
    for _, now in play(engine, shared, server, store, rounds, size, SEED):
        shared, server = now
        found = {
            int(i): row.numpy()
            for part, rows in engine.on_common(shared, ids, store, torch.from_numpy(probe))
            for i, row in zip(part, rows, strict=True)
        }
        yield shared, [found[int(i)] for i in ids], store, server


def arrays(model):
    return {name: value.numpy() for name, value in model.items()}


def kept(store, client):
    return {name: leaf[0].numpy() for name, leaf in store.get(np.array([client]))["model"].items()}


def same(ours, theirs, where):
    assert set(ours) == set(theirs), where
    for name, value in ours.items():
        assert np.abs(value - theirs[name]).max() <= TOLERANCE, f"{name} {where}"


def rows_to_probe():
    return np.random.default_rng(3).normal(size=(25, D)) * 2


def moved(start, model):
    return max(np.abs(model[name] - value).max() for name, value in start.items())


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize(("batch", "size", "weights"), SETTINGS)
def test_fedbn_follows_its_paper_step_by_step(batch, size, weights, engine):
    method, oracle, told = CASES["FedBN"]
    clients, plan = prepared(method, "normed", batch, weights)
    start, probe = arrays(plan.task.init()), rows_to_probe()
    expected = follow(oracle, plan, clients, start, gradient, told, size)
    for t, (shared, logits, store, _) in enumerate(trajectory(engine, plan, size, probe)):
        same(arrays(shared["model"]), expected[t]["shared"], f"shared in round {t}")
        for i, theirs in enumerate(expected[t]["personal"]):
            assert np.abs(logits[i] - predict(theirs, probe)).max() <= TOLERANCE, f"client {i} in round {t}"
            if store.born[i]:
                norms = {name: theirs[name] for name in theirs if name not in expected[t]["shared"]}
                same(kept(store, i), norms, f"kept by client {i} in round {t}")
    first, second = expected[-1]["personal"][:2]
    assert all(moved({name: first[name]}, second) > 1e-3 for name in norms)  # parameters and statistics of both norms differ
    assert moved(start, first) > 0.05


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize(("batch", "size", "weights"), SETTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_partialfed_follows_its_rule_step_by_step(model, batch, size, weights, engine):
    method, oracle, told = CASES["PartialFed"]
    compare_partialfed(method, oracle, told, model, batch, size, weights, engine)


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
def test_partialfeds_logits_may_take_another_amount_of_work(engine):
    method, oracle, told = CASES["PartialFed"]
    found = compare_partialfed(replace(method, logit_steps=5), oracle, told, "mlp", 5, 3, "size", engine)
    usual = compare_partialfed(method, oracle, told, "mlp", 5, 3, "size", engine)
    assert np.abs(found[-1]["logits"][0] - usual[-1]["logits"][0]).max() > 1e-3


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
def test_partialfed_predicts_with_the_shared_layer_where_the_logits_are_equal(engine):
    method, oracle, told = CASES["PartialFed"]
    least = {"logit_lr": np.nextafter(0.0, 1.0)}  # zero is refused; times a slope below a half this is zero
    found = compare_partialfed(replace(method, **least), oracle, {**told, **least}, "mlp", 5, 3, "size", engine, learns=False)
    assert not np.any(found[-1]["logits"])
    assert all(moved(client, found[-1]["shared"]) == 0 for client in found[-1]["personal"])
    assert all(moved(own, found[-1]["shared"]) > 1e-3 for own in found[-1]["own"])


def compare_partialfed(method, oracle, told, model, batch, size, weights, engine, learns=True):
    clients, plan = prepared(method, model, batch, weights)
    start, probe = arrays(plan.task.init()), rows_to_probe()

    def keys(t, i, phase):
        ids = np.array([i])
        return step_keys(plan.feed.keys(ids, t, phase), int(plan.feed.steps(ids, phase)[0]))[0]

    expected = follow(oracle, plan, clients, start, gradient, {**told, "keys": keys}, size)
    for t, (shared, logits, store, _) in enumerate(trajectory(engine, plan, size, probe)):
        same(arrays(shared["model"]), expected[t]["shared"], f"shared in round {t}")
        for i, theirs in enumerate(expected[t]["personal"]):
            assert np.abs(logits[i] - predict(theirs, probe)).max() <= TOLERANCE, f"client {i} in round {t}"
            assert store.born[i] == (expected[t]["own"][i] is not None)
            if store.born[i]:
                same(kept(store, i), expected[t]["own"][i], f"kept by client {i} in round {t}")
                a = store.get(np.array([i]))["logits"][0].numpy()
                assert np.abs(a - expected[t]["logits"][i]).max() <= TOLERANCE, f"logits of client {i} in round {t}"
    drawn = np.stack([yes for past in expected[1:] for yes in past["drawn"].values()])
    assert (drawn.any(0) & ~drawn.all(0)).all()  # every layer has begun from both
    assert not learns or min(np.abs(a).max() for a in expected[-1]["logits"]) > 0.01
    if model == "normed" and batch:
        chosen = np.concatenate([partialfed.take_shared(a) for past in expected for a in past["logits"] if a is not None])
        assert chosen.any()  # predictions with layers of either kind
        assert not chosen.all()
    assert moved(start, expected[-1]["shared"]) > 0.05
    return expected


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize(("batch", "size", "weights"), SETTINGS)
def test_dynamic_fedclup_follows_fedclup_with_the_lam_of_the_moment(batch, size, weights, engine):
    method, oracle, told = CASES["FedCLUPDynamic"]
    clients, plan = prepared(method, "linear", batch, weights)
    probe = np.concatenate([np.zeros((1, D)), np.eye(D)])  # logits here are the biases, and the biases plus a column of weights
    told = {**told, "risk": linear_risk, "validation": validation()}
    expected = follow(oracle, plan, clients, np.zeros(K * D + K), softmax_gradient, told, size, rounds=10)
    for t, (shared, logits, _, server) in enumerate(trajectory(engine, plan, size, probe, rounds=10)):
        assert np.abs(flat(shared["model"]) - expected[t]["shared"]).max() <= TOLERANCE, f"shared in round {t}"
        assert float(shared["lam"]) == pytest.approx(expected[t]["lam"], rel=1e-12), f"lam after round {t}"
        assert float(server["best"]) == pytest.approx(expected[t]["mark"], abs=TOLERANCE), f"mark after round {t}"
        for i, theirs in enumerate(expected[t]["personal"]):
            ours = np.concatenate([(logits[i][1:] - logits[i][0]).T.ravel(), logits[i][0]])
            assert np.abs(ours - theirs).max() <= TOLERANCE, f"client {i} in round {t}"
    lams = [past["lam"] for past in expected]
    assert RISING["lam"] == lams[0] < RISING["lam"] * RISING["factor"] in lams
    assert lams[-1] == RISING["ceiling"] < RISING["lam"] * RISING["factor"] ** 2
    assert any(past["fell"] for past in expected[lams.index(RISING["lam"] * RISING["factor"]) :])  # after a rise
    assert np.abs(theirs).max() > 0.05


@pytest.mark.parametrize("rows", [6, 1])
@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_written_by_hand_is_the_slope_of_the_risk(model, rows):
    draw = np.random.default_rng(5)
    start = arrays(prepared(ft.FedAvg(), model, None, "uniform")[1].task.init())
    point = {name: value + 0.3 * draw.uniform(size=value.shape) for name, value in start.items()}
    X, y = draw.normal(size=(rows, D)), draw.integers(0, K, rows)
    found, _ = gradient(point, X, y)
    for name, value in found.items():
        for at in np.ndindex(value.shape):
            assert slope(lambda m: network_risk(m, X, y), point, name, at) == pytest.approx(value[at], abs=1e-7)


def slope(function, model, name, at, h=1e-5):
    step = np.zeros_like(model[name])
    step[at] = h
    return (function({**model, name: model[name] + step}) - function({**model, name: model[name] - step})) / (2 * h)


def test_the_logits_slope_is_that_of_the_mixture_straight_through():
    """Forward the draw, backward the softmax: W(b) = (h + s(b) - s(a)) applied to (g, w), differentiated in b at a."""
    draw = np.random.default_rng(6)
    g = arrays(ft.Task.from_module(seeded(normed)).init())
    w = {name: value + 0.3 * draw.uniform(size=value.shape) for name, value in g.items()}
    X, y, tau = draw.normal(size=(7, D)), draw.integers(0, K, 7), 0.8
    layers = partialfed.layers(g)
    a, e = draw.normal(size=(2, len(layers), 2))
    chosen = np.stack([partialfed.take_shared(a + e), ~partialfed.take_shared(a + e)], 1)
    assert chosen.any(0).all()

    def straight(tree):
        share = chosen + partialfed.softmax((tree["b"] + e) / tau) - partialfed.softmax((a + e) / tau)
        return network_risk(
            {n: own * g[n] + rest * w[n] for names, (own, rest) in zip(layers, share, strict=True) for n in names}, X, y
        )

    found = partialfed.logit_gradient(gradient, g, w, a, e, tau, X, y)
    assert np.abs(found).max() > 1e-3
    for at in np.ndindex(a.shape):
        assert slope(straight, {"b": a}, "b", at) == pytest.approx(found[at], abs=1e-7)


def test_the_noise_is_gumbels():
    assert partialfed.finalise(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # SplitMix64's first word from seed 0
    e = partialfed.gumbel(-12345, 20_000)
    assert e.shape == (20_000, 2)
    assert e.mean(0) == pytest.approx(np.euler_gamma, abs=0.03)  # three standard errors of pi / sqrt(6 * 20000)
    assert e.var(0) == pytest.approx(np.pi**2 / 6, rel=0.05)
    assert abs(np.corrcoef(e.T)[0, 1]) < 0.03
