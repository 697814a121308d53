"""Partial, global and further methods against their NumPy transcriptions: float64, both engines, to 1e-9.

The model is a softmax regression with bias, flattened as [weights, biases]; for split models the biases are personal.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.engine.base import NO_ROUND
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.run import build_task, cohort_of, make_plan, play
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.runs.store import Store
from tests.oracles import feddf, knn

D, K, ROUNDS, SEED, TOLERANCE = 3, 3, 5, 4, 1e-9
WEIGHTS, BIASES = np.arange(K * D), np.arange(K * D, K * D + K)
SPLIT = {"shared_at": WEIGHTS, "personal_at": BIASES}
YOGI = {"server_lr": 0.3, "beta1": 0.8, "beta2": 0.9, "tau": 0.05}

# name -> (method, module of the oracle, what the oracle is told, turnout may be partial, weights may differ)
CASES = {
    "FedAvgP": (
        ft.FedAvgP(lr=0.2, personal_lr=0.3, server_lr=0.8, personal_server_lr=0.6, personal=["bias"], steps=3),
        "fedavgp",
        {"lr": 0.2, "personal_lr": 0.3, "server_lr": 0.8, "personal_server_lr": 0.6, **SPLIT},
    ),
    "FedSim": (ft.FedSim(lr=0.2, personal="bias", steps=3), "fedper", {"lr": 0.2, **SPLIT}),
    "FedPer": (ft.FedPer(lr=0.2, personal="bias", steps=3), "fedper", {"lr": 0.2, **SPLIT}),
    "LGFedAvg": (
        ft.LGFedAvg(lr=0.2, personal="weight", steps=3),
        "fedper",
        {"lr": 0.2, "shared_at": BIASES, "personal_at": WEIGHTS},
    ),
    "FedAlt": (
        ft.FedAlt(lr=0.2, personal_lr=0.3, personal="bias", steps=3, personal_steps=4),
        "fedalt",
        {"lr": 0.2, "personal_lr": 0.3, **SPLIT},
    ),
    "FedRep": (
        ft.FedRep(lr=0.2, personal="bias", steps=1, personal_steps=6),
        "fedalt",
        {"lr": 0.2, "personal_lr": 0.2, **SPLIT},
    ),
    "FedBABU": (ft.FedBABU(lr=0.2, personal="bias", steps=3, finetune_steps=4), "fedbabu", {"lr": 0.2, **SPLIT}),
    "FedAvgM": (
        ft.FedAvgM(lr=0.2, steps=3, server_lr=0.7, beta1=0.6),
        "fedopt",
        {"lr": 0.2, "server_lr": 0.7, "rule": "avgm", "beta1": 0.6, "beta2": 0.0, "tau": 0.0},
    ),
    "FedAdam": (ft.FedAdam(lr=0.2, steps=3, **YOGI), "fedopt", {"lr": 0.2, "rule": "adam", **YOGI}),
    "FedYogi": (ft.FedYogi(lr=0.2, steps=3, **YOGI), "fedopt", {"lr": 0.2, "rule": "yogi", **YOGI}),
    "MTL": (ft.MTL(lr=0.2, lam=0.7, steps=3), "mtl", {"lr": 0.2, "lam": 0.7}),
    "APFL": (ft.APFL(lr=0.2, alpha=0.4, steps=3), "apfl", {"lr": 0.2, "alpha": 0.4, "adaptive": False, "alpha_lr": 0.0}),
    "APFL adaptive": (
        ft.APFL(lr=0.2, alpha=0.4, adaptive=True, alpha_lr=0.5, steps=3),
        "apfl",
        {"lr": 0.2, "alpha": 0.4, "adaptive": True, "alpha_lr": 0.5},
    ),
    "PerFedAvg": (
        ft.PerFedAvg(lr=0.2, inner_lr=0.1, server_lr=0.9, steps=3, finetune_steps=2),
        "perfedavg",
        {"lr": 0.2, "inner_lr": 0.1, "hessian": "first-order", "delta": 1e-3, "server_lr": 0.9},
    ),
    "PerFedAvg free": (
        ft.PerFedAvg(lr=0.2, inner_lr=0.1, hessian="free", delta=1e-2, steps=3),
        "perfedavg",
        {"lr": 0.2, "inner_lr": 0.1, "hessian": "free", "delta": 1e-2, "server_lr": 1.0},
    ),
}
PLAIN_MEAN = {  # the paper's mean is plain: uniform weights only
    "Scaffold": (ft.Scaffold(lr=0.2, steps=3, server_lr=0.9), "scaffold", {"lr": 0.2, "server_lr": 0.9}),
    "FedDyn": (ft.FedDyn(lr=0.2, alpha=0.4, steps=3), "feddyn", {"lr": 0.2, "alpha": 0.4}),
}


def softmax_gradient(w, X, y):
    """Mean cross-entropy of logits X W' + b, by hand."""
    logits = X @ w[WEIGHTS].reshape(K, D).T + w[BIASES]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.concatenate([(p.T @ X / len(y)).ravel(), p.mean(0)])


def risk(w, X, y):
    logits = X @ w[WEIGHTS].reshape(K, D).T + w[BIASES]
    shifted = logits - logits.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y]))


def data():
    draw = np.random.default_rng(7)
    return [
        (draw.normal(size=(n, D)) + 0.4 * i, np.r_[0, 1, 2, draw.integers(0, K, n - K)]) for i, n in enumerate((9, 14, 5, 11))
    ]


def flat(model):
    parts = [model[name].numpy().reshape(-1) for name in ("weight", "bias") if name in model]
    return np.concatenate(parts)


def prepared(method, batch=None, weights="uniform"):
    clients = data()
    federation = ft.Federation.from_arrays(clients, clients).to(torch.float64)
    task = build_task("linear", federation, 0, torch.float64, bias=True)
    return clients, make_plan(method, task, federation, batch, SEED, weights)


def trajectory(engine, plan, rounds, size):
    """After each round: the shared model, and every client's model as found from what it predicts.

    The model is linear, so logits at 0 and at the unit vectors are its biases and weights, whatever a method stores."""
    shared, server = plan.algorithm.init_server(plan.task)
    store = Store(len(plan.federation))
    probe = torch.cat([torch.zeros(1, D), torch.eye(D)]).double()
    for _, now in play(engine, shared, server, store, rounds, size, SEED):
        shared, server = now
        ids = np.arange(len(plan.federation))
        found = {
            int(i): row for part, rows in engine.on_common(shared, ids, store, probe) for i, row in zip(part, rows, strict=True)
        }
        models = [{"weight": (found[i][1:] - found[i][0]).T, "bias": found[i][0]} for i in ids]
        yield flat(shared["model"]) if "model" in shared else shared, [flat(m) for m in models]


def compare(method, module, told, batch, size, weights, engine, skip=0, **more):
    clients, plan = prepared(method, batch, weights)

    def batches(t, i, phase):
        if phase == "roll":
            return plan.feed.rows(i, 0, "train")
        phase = phase if phase in plan.feed.phases else "train"
        return plan.feed.rows(i, NO_ROUND if phase == "personalize" else t + skip, phase)

    expected = import_module(f"tests.oracles.{module}").run(
        softmax_gradient,
        clients,
        np.zeros(K * D + K),
        rounds=ROUNDS,
        batches=batches,
        cohorts=lambda t: cohort_of(plan.federation, method, size, SEED, t + skip).tolist(),
        weights=plan.weights,
        **told,
        **more,
    )
    options = {"workers": 1} if engine is LoopEngine else {}
    path = list(trajectory(engine(plan, **options), plan, ROUNDS + skip, size))[skip:]
    for t, (shared, personal) in enumerate(path):
        if isinstance(shared, np.ndarray):
            assert np.abs(shared - expected[t]["shared"]).max() <= TOLERANCE, f"shared in round {t}"
        for i, (mine, theirs) in enumerate(zip(personal, expected[t]["personal"], strict=True)):
            assert np.abs(mine - theirs).max() <= TOLERANCE, f"client {i} in round {t}"
    assert np.abs(personal[0]).max() > 0.05
    return path, expected


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize(("batch", "size", "weights"), [(None, 4, "uniform"), (None, 3, "size"), (4, 3, "uniform")])
@pytest.mark.parametrize("name", CASES)
def test_method_follows_its_paper_step_by_step(name, batch, size, weights, engine):
    compare(*CASES[name], batch, size, weights, engine)


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize(("batch", "size"), [(None, 4), (None, 2), (4, 3)])
@pytest.mark.parametrize("name", PLAIN_MEAN)
def test_method_with_a_plain_mean_follows_its_paper(name, batch, size, engine):
    compare(*PLAIN_MEAN[name], batch, size, "uniform", engine)


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize(("batch", "size"), [(None, 4), (None, 2), (4, 3)])
def test_scaffold_p_follows_algorithm_4_1_after_its_roll_call(batch, size, engine):
    """Our round 0 is the roll call: our round t + 1 is the paper's round t."""
    method = ft.ScaffoldP(lr=0.2, personal_lr=0.3, server_lr=0.8, personal_server_lr=0.6, personal="bias", steps=3)
    told = {"lr": 0.2, "personal_lr": 0.3, "server_lr": 0.8, "personal_server_lr": 0.6, **SPLIT}
    compare(method, "scaffoldp", told, batch, size, "uniform", engine, skip=1)


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize("k", [1, 3])
def test_hypcluster_follows_its_paper(k, engine):
    method = ft.HypCluster(lr=0.2, steps=3, k=k, spread=0.5)
    _, plan = prepared(method)
    models = method.init_server(plan.task)[0]["models"]
    starts = np.stack([flat(tree.map(lambda leaf, j=j: leaf[j], models)) for j in range(k)])
    path, expected = compare(method, "hypcluster", {"lr": 0.2, "k": k, "starts": starts, "risk": risk}, None, 3, "size", engine)
    models = path[-1][0]["models"]
    found = np.concatenate([flat(tree.map(lambda leaf, j=j: leaf[j], models)) for j in range(k)])
    assert np.abs(found - expected[-1]["shared"]).max() <= TOLERANCE


def test_knn_per_mixes_as_the_paper_says():
    clients, plan = prepared(ft.KNNPer(lr=0.2, steps=3, k=4, weight=0.3, scale=0.5))
    engine = VectorizedEngine(plan)
    shared, server = plan.algorithm.init_server(plan.task)
    store = Store(4)
    for _, now in play(engine, shared, server, store, 3, 4, SEED):
        shared, server = now
    w = flat(shared["model"])
    for found in engine.predictions(shared, np.arange(4), store, plan.federation.test):
        for i, logits, mask in zip(found.ids, found.personal, found.mask, strict=True):
            X, y = clients[i]
            z = np.exp(X @ w[WEIGHTS].reshape(K, D).T + w[BIASES])
            expected = knn.predict(X, y, X, z / z.sum(1, keepdims=True), 4, 0.3, K, 0.5)  # features of a linear model: its input
            assert np.abs(logits[mask].exp().numpy() - expected).max() <= TOLERANCE


def test_knn_pers_weight_is_chosen_on_validation_only():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 2))
    noise = draw.integers(0, 2, 40)
    truth = (x[:, 0] * x[:, 1] > 0).astype(int)  # not linear: neighbours know, the model does not
    fits = ft.Federation.from_arrays([(x, truth)], [(x, noise)], val=[(x, truth)])
    run = ft.run(ft.KNNPer(k=3, steps=2, lr=0.1), fits, rounds=2)
    own = (run.predict_global(x).argmax(1).numpy() == truth).mean()
    assert float(run.personal[0]["weight"]) > 0
    assert (run.predict(0, x).argmax(1).numpy() == truth).mean() > own
    without = ft.run(ft.KNNPer(steps=1), ft.Federation.from_arrays([(x, truth)], [(x, truth)]), rounds=1)
    assert float(without.personal[0]["weight"]) == 0.5


def test_feddf_distils_as_the_paper_says():
    draw = np.random.default_rng(1)
    clients = data()
    public = draw.normal(size=(20, D))
    federation = ft.Federation.from_arrays(clients, clients, public=public).to(torch.float64)
    task = build_task("linear", federation, 0, torch.float64, bias=False)
    method = ft.FedDF(kd_steps=7, kd_lr=0.05, kd_batch=20, temperature=2.0)
    teachers = [draw.normal(size=K * D) for _ in range(3)]
    student = draw.normal(size=K * D)  # not the mean: for a linear model that is the answer already
    stacked = {"weight": torch.from_numpy(np.stack(teachers)).view(3, K, D)}
    found = method.distil(task, {"weight": torch.from_numpy(student.copy()).view(K, D)}, stacked)["weight"].numpy().ravel()
    expected = feddf.adam(student, teachers, None, public, 7, 0.05, 2.0)
    assert np.abs(found - expected).max() <= TOLERANCE
    assert np.abs(found - student).max() > 1e-3


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_scaffold_and_feddyn_reach_the_pooled_optimum_where_fedavg_does_not(share):
    draw = np.random.default_rng(2)
    clients = []
    for _ in range(6):
        x = draw.normal(size=(20, 3)) * draw.uniform(0.5, 2.0, 3)
        clients.append((x, x @ (3 * draw.normal(size=3))))
    federation = ft.Federation.from_arrays(clients, clients)
    best = np.linalg.solve(sum(x.T @ x for x, _ in clients), sum(x.T @ y for x, y in clients))
    options = {"cohort": share, "bias": False, "dtype": "float64", "evaluate_every": 0}

    def apart(method, rounds):
        return np.abs(ft.run(method, federation, rounds=rounds, **options).model()["weight"].numpy()[0] - best).max()

    assert apart(ft.Scaffold(lr=0.05, steps=6), 1500) < 1e-8
    assert apart(ft.FedDyn(lr=0.05, steps=6, alpha=0.5), 1500) < 1e-8
    assert apart(ft.FedAvg(lr=0.05, steps=6), 1500) > 1e-2


def test_split_methods_refuse_parts_that_are_not_there():
    fed = ft.Federation.load("digits", clients=3)
    with pytest.raises(ft.errors.InvalidArgument, match="its groups are head, body"):
        ft.run(ft.FedPer(personal="neck"), fed, "mlp:8", rounds=1)
    with pytest.raises(ft.errors.InvalidArgument, match="leaves no shared"):
        ft.run(ft.FedPer(), fed, "linear", rounds=1)
    with pytest.raises(ft.errors.InvalidArgument, match="leaves no personal"):
        ft.run(ft.FedBN(), fed, "mlp:8", rounds=1)
    with pytest.raises(ft.errors.InvalidArgument, match="public="):
        ft.run(ft.FedDF(), fed, rounds=1)
    with pytest.raises(ft.errors.InvalidArgument, match="plain SGD"):
        ft.Scaffold(opt=ft.SGD(momentum=0.9))
    numbers = ft.Federation.load("clup-regression", clients=2)
    with pytest.raises(ft.errors.InvalidArgument, match="classifier"):
        ft.run(ft.KNNPer(), numbers, rounds=1)


def test_a_part_is_found_by_module_and_never_by_substring():
    fed = ft.Federation.load("digits", clients=3)
    net = torch.nn.Sequential()
    net.add_module("bn_free", torch.nn.Linear(64, 6))
    net.add_module("down", torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.ReLU()))
    net.add_module("top", torch.nn.Linear(6, 10))
    run = ft.run(ft.FedBN(), fed, net, rounds=1)
    assert set(run.personal[0]["model"]) == {
        "down.0.weight",
        "down.0.bias",
        "buffer:down.0.running_mean",
        "buffer:down.0.running_var",
    }
    run = ft.run(ft.FedSim(personal=["down", "top.bias"]), fed, net, rounds=1)
    assert "top.bias" in run.personal[0]["model"]
    assert "top.weight" in run.shared["model"]
