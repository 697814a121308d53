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
from fedtailor.algorithms.base import Round
from fedtailor.engine.base import NO_ROUND
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.run import build_task, cohort_of, make_plan, play
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.local import Schedule
from fedtailor.runs.store import Store
from tests.oracles import al2sgd, feddf, knn

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
    stacked = {"model": {"weight": torch.from_numpy(np.stack(teachers)).view(3, K, D)}}
    reduce = method.reducer(task, {}, Round())
    upload = reduce.finish(reduce.add(reduce.start(), stacked, torch.ones(3), torch.arange(3)))
    upload["model"] = {"weight": torch.from_numpy(student.copy()).view(K, D)}
    found = method.server_update(task, {}, {}, upload, Round())[0]["model"]["weight"].numpy().ravel()
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


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize("batch", [None, 4])
def test_l2gd_follows_its_paper(batch, engine):
    method = ft.L2GD(lr=0.3, lam=0.6, p=0.4)
    rnd = Round(seed=SEED)
    coins = [rnd.uniform("L2GD", t) < 0.4 for t in range(ROUNDS)]
    assert len(set(coins)) == 2  # both branches are walked
    told = {"lr": 4 * 0.3, "lam": 0.6, "p": 0.4, "coins": coins.__getitem__}  # their alpha is n times our lr
    compare(method, "l2gd", told, batch, 4, "uniform", engine)


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
def test_al2sgd_follows_its_paper(engine):
    method = ft.AL2SGD(lam=0.6, p=0.4, rho=0.5, mu=0.1, smoothness=3.0)
    rnd = Round(seed=SEED)
    coins = [rnd.uniform("AL2SGD coin", t) < 0.4 for t in range(12)]
    refresh = [rnd.uniform("AL2SGD refresh", t) < 0.5 for t in range(12)]
    assert len(set(coins)) == len(set(refresh)) == 2
    steps = al2sgd.theory(4, 0.1, 3.0, 0.6, 0.4, 0.5)
    assert method.constants(4) == pytest.approx((*(steps[k] for k in ("eta", "theta1", "theta2", "gamma", "beta")), 0.4, 0.5))
    clients, plan = prepared(method)
    expected = al2sgd.run(
        softmax_gradient, clients, np.zeros(K * D + K), rounds=12, cohorts=None, weights=None,
        batches=lambda t, i, phase: plan.feed.rows(i, t, phase), p=0.4, rho=0.5, lam=0.6,
        coins=coins.__getitem__, refresh=refresh.__getitem__, **steps,
    )  # fmt: skip
    options = {"workers": 1} if engine is LoopEngine else {}
    for t, (_, personal) in enumerate(trajectory(engine(plan, **options), plan, 12, 4)):
        assert max(np.abs(a - b).max() for a, b in zip(personal, expected[t]["personal"], strict=True)) <= TOLERANCE
    assert np.abs(personal[0]).max() > 1e-3


def test_al2sgds_estimator_has_the_gradient_as_its_mean():
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(2, 4, 3))
    hessians = [np.diag(draw.uniform(1, 2, 3)) for _ in range(4)]

    def rows(points):
        return np.stack([h @ v for h, v in zip(hessians, points, strict=True)])

    p, lam = 0.3, 0.7
    mean = p * al2sgd.estimator(rows, x, w, True, p, lam) + (1 - p) * al2sgd.estimator(rows, x, w, False, p, lam)
    assert np.allclose(mean, (rows(x) + lam * (x - x.mean(0))) / 4, atol=1e-14)


def ill_conditioned(spread):
    """Least squares with Hessian diag(1, .., 1000) on every client, minimisers ``spread`` apart."""
    draw = np.random.default_rng(0)
    root = np.sqrt(np.logspace(0, 3, 6) * 6)
    center = draw.normal(size=6)
    clients = []
    for _ in range(5):
        x = np.diag(root)
        clients.append((x, x @ (center + spread * draw.normal(size=6))))
    return clients, ft.Federation.from_arrays(clients, clients)


def minimiser_of_problem_2(clients, lam):
    """With one common Hessian H: w_i = (H + lam)^-1 (H m_i + lam g), m_i being the client's own minimiser and g their mean."""
    x = clients[0][0]
    h = x.T @ x / len(x)
    own = [np.linalg.solve(a, b) for a, b in clients]
    g = np.mean(own, 0)
    return [np.linalg.solve(h + lam * np.eye(6), h @ m + lam * g) for m in own]


def communications(run):
    return sum(r["bytes_up"] > 0 for r in run.history)


@pytest.mark.slow
def test_al2sgd_reaches_problem_2_in_fewer_communications_than_l2gd_on_an_ill_conditioned_case():
    lam, top = 100.0, 1000.0
    options = {"bias": False, "dtype": "float64", "evaluate_every": 0}
    clients, same = ill_conditioned(0.0)  # a common minimiser: the only case where L2GD with a constant step converges
    best = minimiser_of_problem_2(clients, lam)

    fast, slow = ft.AL2SGD(lam=lam, mu=1.0, smoothness=top), ft.L2GD(lam=lam, lr=1 / (2 * (top + lam)), p=lam / (lam + top))

    def after(method, federation, best, rounds):
        """(squared error, communications)"""
        run = ft.run(method, federation, rounds=rounds, **options)
        models = [run.personal[i].get("model", run.personal[i].get("y"))["weight"].numpy()[0] for i in range(5)]
        return sum(((m - b) ** 2).sum() for m, b in zip(models, best, strict=True)), communications(run)

    def gain(method):
        """How much the logarithm of the error falls per communication."""
        (early, first), (late, second) = (after(method, same, best, rounds) for rounds in (1500, 3000))
        return np.log(early / late) / (second - first)

    assert gain(fast) > 1.3 * gain(slow)
    clients, apart = ill_conditioned(1.0)  # minimisers differ: only AL2SGD+ gets there
    best = minimiser_of_problem_2(clients, lam)
    assert after(fast, apart, best, 5000)[0] < 1e-8
    assert after(slow, apart, best, 5000)[0] > 1e-3


def test_l2gd_reaches_problem_2_with_a_step_that_falls():
    federation = ft.Federation.load("clup-regression", clients=4, d=3, rows=12, kappa=2.0, R=1.0)
    clients = [tuple(t.numpy() for t in federation.train.client(i)) for i in range(4)]
    inverses = [np.linalg.inv(x.T @ x / len(y) + 0.5 * np.eye(3)) for x, y in clients]
    rights = [x.T @ y / len(y) for x, y in clients]
    g = np.linalg.solve(
        np.eye(3) - 0.5 * np.mean(inverses, 0), np.mean([a @ b for a, b in zip(inverses, rights, strict=True)], 0)
    )

    def apart(lr, rounds):
        run = ft.run(ft.L2GD(lam=0.5, lr=lr, p=0.3), federation, rounds=rounds, bias=False, dtype="float64", evaluate_every=0)
        return max(np.abs(run.model(i)["weight"].numpy()[0] - inverses[i] @ (rights[i] + 0.5 * g)).max() for i in range(4))

    assert apart(Falling(), 3000) < 0.03
    assert apart(0.3, 300) > 0.06  # a constant step hovers


class Falling(Schedule):
    """4 / (t + 40): sums to infinity, its squares do not."""

    def at(self, round):
        return 4 / (round + 40)


def test_methods_of_all_clients_refuse_partial_turnout():
    fed = ft.Federation.load("digits", clients=3)
    with pytest.raises(ft.errors.InvalidArgument, match=r"cohort=1\.0"):
        ft.run(ft.L2GD(), fed, rounds=1, cohort=2)
    with pytest.raises(ft.errors.InvalidArgument, match="mu and smoothness"):
        ft.run(ft.AL2SGD(), fed, rounds=1)
    with pytest.raises(ft.errors.InvalidArgument, match="one iteration"):
        ft.L2GD(steps=5)


@pytest.mark.filterwarnings("ignore:.*classes are assumed")  # one client alone lacks a digit
def test_dynamic_lam_rises_when_validation_stalls_and_not_before():
    fed = ft.Federation.load("digits", clients=4, partition="dirichlet:0.5")
    still = ft.run(ft.FedCLUPDynamic(lam=0.02, lr=1e-6, steps=1, patience=3, factor=3.0, ceiling=5.0), fed, rounds=10)
    assert float(still.shared["lam"]) == pytest.approx(
        0.02 * 3**3
    )  # nothing improves: raised in rounds 3, 6 and 9 (the first sets the mark)
    capped = ft.run(ft.FedCLUPDynamic(lam=0.02, lr=1e-6, steps=1, patience=1, factor=3.0, ceiling=0.5), fed, rounds=10)
    assert float(capped.shared["lam"]) == pytest.approx(0.5)
    moving = ft.run(ft.FedCLUPDynamic(lam=0.02, lr=0.5, steps=2, patience=3), fed, rounds=5)
    assert float(moving.shared["lam"]) == pytest.approx(0.02)
    from fedtailor.data.federation import Federation

    bare = Federation.from_arrays([fed.train.client(0)], [fed.test.client(0)])
    with pytest.raises(ft.errors.InvalidArgument, match="val="):
        ft.run(ft.FedCLUPDynamic(), bare, rounds=1)
