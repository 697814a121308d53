"""Reductions and fixed points: where a method must become another, or reach a minimiser known in closed form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.theory.rates import fedclup_rate

FAST = {"rounds": 6, "evaluate_every": 0}


@pytest.fixture(scope="module")
def digits():
    return ft.Federation.load("digits", clients=6, partition="dirichlet:0.5")


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("model", ["linear", "mlp:12"])
def test_fedprox_with_mu_0_is_fedavg_bit_for_bit(digits, engine, model):
    options = {**FAST, "batch_size": 16, "cohort": 0.5, "engine": engine}
    assert equal(
        ft.run(ft.FedProx(mu=0.0, epochs=2), digits, model, **options).shared,
        ft.run(ft.FedAvg(epochs=2), digits, model, **options).shared,
    )


@pytest.mark.parametrize(
    "method",
    [ft.Ditto(lam=0.0, epochs=2), ft.FedCLUP(lam=0.0, epochs=2), ft.FedProxPersonal(lam=0.0, epochs=2, final_steps=0)],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_without_a_pull_everyone_is_alone(digits, method, engine):
    options = {**FAST, "batch_size": 16, "engine": engine}
    ours, local = ft.run(method, digits, **options), ft.run(ft.Local(epochs=2), digits, **options)
    assert all(equal(ours.personal[i], local.personal[i]) for i in range(len(digits)))


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize(
    ("personal", "other"),
    [((), ft.FedAvg(epochs=2)), (("body", "head"), ft.Local(epochs=2)), ("head", ft.FedSim(epochs=2, personal="head"))],
    ids=["FedAvg", "Local", "FedSim"],
)
def test_partialfed_with_a_fixed_choice_is_another_method_bit_for_bit(digits, personal, other, engine):
    options = {**FAST, "batch_size": 16, "engine": engine}
    ours = ft.run(ft.PartialFed(epochs=2, personal=personal), digits, "mlp:12", **options)
    theirs = ft.run(other, digits, "mlp:12", **options)
    for i in range(len(digits)):
        x = digits.test.client(i)[0]
        assert torch.equal(ours.predict(i, x), theirs.predict(i, x))


def test_dittos_and_fine_tunings_shared_model_is_fedavgs_bit_for_bit(digits):
    options = {**FAST, "batch_size": 16, "cohort": 0.5, "engine": "vectorized"}
    plain = ft.run(ft.FedAvg(epochs=2), digits, **options).shared
    assert equal(ft.run(ft.Ditto(lam=3.0, epochs=2), digits, **options).shared, plain)
    assert equal(ft.run(ft.FedAvgFT(epochs=2), digits, **options).shared, plain)


def test_fedclup_with_server_lr_1_over_lam_averages(digits):
    run = ft.run(ft.FedCLUP(lam=0.7, server_lr=1 / 0.7, epochs=1), digits, rounds=1, dtype="float64")
    mean = torch.stack([run.personal[i]["model"]["weight"] for i in range(len(digits))]).mean(0)
    assert torch.allclose(run.shared["model"]["weight"], mean, atol=1e-14, rtol=0)


def test_fedclup_with_a_tiny_lam_approaches_local_and_with_a_huge_one_gives_everybody_one_model():
    federation = ft.Federation.load("clup-regression", clients=5, R=2.0)
    options = {"bias": False, "dtype": "float64", "evaluate_every": 0}
    local = ft.run(ft.Local(lr=0.09, steps=20), federation, rounds=20, **options)
    apart = []
    for lam in (1e-2, 1e-4, 1e-6):
        run = ft.run(ft.FedCLUP(lam=lam, lr=0.09, steps=20), federation, rounds=20, **options)
        apart.append(max(float(tree.dist2(run.personal[i], local.personal[i])) ** 0.5 for i in range(5)))
    assert apart[0] > 5 * apart[1] > 25 * apart[2]  # linear in lam, up to a factor of two
    spread = []
    for lam in (1e2, 1e4, 1e6):
        run = ft.run(ft.FedCLUP(lam=lam, lr=1 / (lam + 10), steps=20), federation, rounds=60, **options)
        spread.append(max(float(tree.dist2(run.personal[i], run.shared)) ** 0.5 for i in range(5)))
    assert spread[0] > 5 * spread[1] > 25 * spread[2]


def problem_2(clients, lam, weights):
    """Minimiser of sum p_i (1/(2n) |X_i w_i - y_i|^2 + lam/2 |g - w_i|^2), by the normal equations.

    With H_i = X'X/n and b_i = X'y/n: w_i = (H_i + lam)^-1 (b_i + lam g), and g = sum p_i w_i."""
    d = clients[0][0].shape[1]
    inverses = [np.linalg.inv(x.T @ x / len(y) + lam * np.eye(d)) for x, y in clients]
    rights = [x.T @ y / len(y) for x, y in clients]
    left = np.eye(d) - lam * sum(p * a for p, a in zip(weights, inverses, strict=True))
    g = np.linalg.solve(left, sum(p * a @ b for p, a, b in zip(weights, inverses, rights, strict=True)))
    return g, [a @ (b + lam * g) for a, b in zip(inverses, rights, strict=True)]


@pytest.fixture(scope="module")
def least_squares():
    federation = ft.Federation.load("clup-regression", clients=6, d=5, rows=20, kappa=8.0, R=1.5)
    return federation, [tuple(t.numpy() for t in federation.train.client(i)) for i in range(6)]


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("lam", [0.05, 0.5, 5.0])
def test_fedclup_with_the_theorys_steps_reaches_problem_2_at_corollary_2s_rate(least_squares, lam, engine):
    federation, clients = least_squares
    g, w = problem_2(clients, lam, np.full(6, 1 / 6))
    errors = []
    rounds = 120
    run = ft.run(
        ft.FedCLUP(lam=lam, steps="theory"),
        federation,
        rounds=rounds,
        bias=False,
        dtype="float64",
        engine=engine,
        evaluate_every=0,
    )
    assert run.summary["mu"] == pytest.approx(1.0, rel=1e-9)
    assert run.summary["smoothness"] == pytest.approx(8.0, rel=1e-9)
    assert np.abs(run.model()["weight"].numpy()[0] - g).max() < 1e-8
    assert max(np.abs(run.model(i)["weight"].numpy()[0] - w[i]).max() for i in range(6)) < 1e-8
    # squared error per round, from shorter runs of the same seed (a run is its own prefix)
    for count in (2, 6, 10):
        short = ft.run(run.algorithm, federation, rounds=count, bias=False, dtype="float64", engine=engine, evaluate_every=0)
        errors.append(float(((short.model()["weight"].numpy()[0] - g) ** 2).sum()))
    for early, late in itertools.pairwise(errors):
        assert late <= early * fedclup_rate(lam, 1.0, 8.0) ** 4


@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_problem_2_is_reached_with_weights_by_size(weights):
    draw = np.random.default_rng(3)
    clients = [(x := draw.normal(size=(n, 4)), x @ draw.normal(size=4)) for n in (10, 30, 17)]
    federation = ft.Federation.from_arrays(clients, clients)
    p = federation.train.sizes / federation.train.sizes.sum() if weights == "size" else np.full(3, 1 / 3)
    g, w = problem_2(clients, 0.5, p)
    run = ft.run(
        ft.FedCLUP(lam=0.5, steps="theory"),
        federation,
        rounds=400,
        bias=False,
        dtype="float64",
        weights=weights,
        evaluate_every=0,
    )
    assert np.abs(run.model()["weight"].numpy()[0] - g).max() < 1e-8
    assert max(np.abs(run.model(i)["weight"].numpy()[0] - w[i]).max() for i in range(3)) < 1e-8


@pytest.mark.parametrize("lam", [0.5, 5.0])
def test_pfedme_with_one_step_a_round_reaches_problem_2_and_is_fedclup(least_squares, lam):
    federation, clients = least_squares
    g, w = problem_2(clients, lam, np.full(6, 1 / 6))
    eta, gamma, steps = 1 / (lam + 8), (lam + 8) / (2 * lam * 8), 40
    options = {"rounds": 120, "bias": False, "dtype": "float64", "evaluate_every": 0}
    run = ft.run(ft.PFedMe(lam=lam, lr=gamma, inner_lr=eta, inner_steps=steps, steps=1), federation, **options)
    assert np.abs(run.model()["weight"].numpy()[0] - g).max() < 1e-8
    assert max(np.abs(run.model(i)["weight"].numpy()[0] - w[i]).max() for i in range(6)) < 1e-8
    same = ft.run(ft.FedCLUP(lam=lam, lr=eta, server_lr=gamma, steps=steps), federation, **options)
    assert float(tree.dist2(run.shared, same.shared)) < 1e-24
    # with beta = 1/(lr lam) and lr lam = 1 the server's mixing alone gives the same method
    mixed = ft.PFedMe(lam=lam, lr=1 / lam, beta=gamma * lam, inner_lr=eta, inner_steps=steps, steps=1)
    assert float(tree.dist2(ft.run(mixed, federation, **options).shared, same.shared)) < 1e-24


def test_two_stage_fedprox_reaches_problem_2(least_squares):
    federation, clients = least_squares
    g, w = problem_2(clients, 0.5, np.full(6, 1 / 6))
    method = ft.FedProxPersonal(lam=0.5, lr=1 / 8.5, server_lr=1.0, steps=30)
    run = ft.run(method, federation, rounds=150, bias=False, dtype="float64", evaluate_every=0)
    assert np.abs(run.model()["weight"].numpy()[0] - g).max() < 1e-8
    assert max(np.abs(run.model(i)["weight"].numpy()[0] - w[i]).max() for i in range(6)) < 1e-8


def test_ditto_reaches_the_prox_of_the_pooled_minimiser_and_local_the_own_one(least_squares):
    federation, clients = least_squares
    hessians = [x.T @ x / len(y) for x, y in clients]
    rights = [x.T @ y / len(y) for x, y in clients]
    options = {"bias": False, "dtype": "float64", "evaluate_every": 0}
    local = ft.run(ft.Local(lr=0.1, steps=40), federation, rounds=20, **options)
    for i in range(6):
        own = np.linalg.solve(hessians[i], rights[i])
        assert np.abs(local.model(i)["weight"].numpy()[0] - own).max() < 1e-8
    # one step a round makes FedAvg gradient descent on the pooled risk: no drift
    pooled = np.linalg.solve(sum(hessians), sum(rights))
    ditto = ft.run(ft.Ditto(lam=0.5, lr=0.1, steps=1, personal_steps=10), federation, rounds=600, **options)
    assert np.abs(ditto.model()["weight"].numpy()[0] - pooled).max() < 1e-8
    for i in range(6):
        v = np.linalg.solve(hessians[i] + 0.5 * np.eye(5), rights[i] + 0.5 * pooled)
        assert np.abs(ditto.model(i)["weight"].numpy()[0] - v).max() < 1e-8


def test_logistic_regression_needs_weight_decay_for_the_theorys_steps_and_then_converges():
    federation = ft.Federation.load("clup-logistic", clients=4, rows=60, d=4, R=0.5)
    with pytest.raises(ft.errors.InvalidArgument, match="weight_decay"):
        ft.run(ft.FedCLUP(lam=0.5, steps="theory"), federation, rounds=1)
    method = ft.FedCLUP(lam=0.5, steps="theory", opt=ft.SGD(weight_decay=0.05))
    run = ft.run(method, federation, rounds=150, dtype="float64", bias=False, evaluate_every=0)
    # at the fixed point every client's gradient balances the pull, and g is the mean
    total = torch.zeros_like(run.model()["weight"])
    for i in range(4):
        x, y = (t.double() if t.is_floating_point() else t for t in run.federation.train.client(i))
        w = run.model(i)["weight"].clone().requires_grad_()
        risk = torch.nn.functional.cross_entropy(x @ w.T, y) + 0.025 * (w**2).sum()
        (gradient,) = torch.autograd.grad(risk, w)
        assert float((gradient + 0.5 * (w.detach() - run.model()["weight"])).abs().max()) < 1e-8
        total += w.detach() / 4
    assert float((total - run.model()["weight"]).abs().max()) < 1e-8
