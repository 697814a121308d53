"""Reductions and fixed points: where a method must become another, or reach a minimiser known in closed form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.theory.rates import fedclup_rate
from tests.algorithms import fixed_points
from tests.algorithms.fixed_points import LINEAR, FixedPoint

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


@pytest.mark.parametrize("point", [pytest.param(p, marks=[pytest.mark.slow] * p.slow) for p in fixed_points.TABLE], ids=str)
def test_method_reaches_the_minimiser_known_in_closed_form(point):
    assert point.apart() < point.tolerance


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("lam", fixed_points.PULLS)
def test_fedclup_with_the_theorys_steps_has_corollary_2s_rate(lam, engine):
    federation, g, _ = fixed_points.pulled(lam)()
    errors = []
    for count in (2, 6, 10):  # squared error per round, from runs of the same seed (a run is its own prefix)
        run = ft.run(ft.FedCLUP(lam=lam, steps="theory"), federation, rounds=count, engine=engine, **LINEAR)
        errors.append(float(((run.model()["weight"].numpy()[0] - g) ** 2).sum()))
    assert run.summary["mu"] == pytest.approx(1.0, rel=1e-9)
    assert run.summary["smoothness"] == pytest.approx(8.0, rel=1e-9)
    for early, late in itertools.pairwise(errors):
        assert late <= early * fedclup_rate(lam, 1.0, 8.0) ** 4


@pytest.mark.parametrize("lam", [0.5, 5.0])
def test_pfedme_with_one_step_a_round_is_fedclup(lam):
    settings, options = fixed_points.as_fedclup(lam), {"rounds": 40, **LINEAR}
    federation, gamma = fixed_points.least_squares(), settings["lr"]
    run = ft.run(ft.PFedMe(**settings), federation, **options)
    same = ft.run(ft.FedCLUP(lam=lam, lr=settings["inner_lr"], server_lr=gamma, steps=40), federation, **options)
    assert float(tree.dist2(run.shared, same.shared)) < 1e-24
    # with beta = 1/(lr lam) and lr lam = 1 the server's mixing alone gives the same method
    mixed = ft.PFedMe(**{**settings, "lr": 1 / lam}, beta=gamma * lam)
    assert float(tree.dist2(ft.run(mixed, federation, **options).shared, same.shared)) < 1e-24


@pytest.mark.parametrize("cohort", [1.0, 0.5])
def test_fedavg_drifts_where_scaffold_and_feddyn_do_not(cohort):
    drifts = FixedPoint(ft.FedAvg(lr=0.05, steps=6), "the pooled minimiser", fixed_points.drifting, 200, {"cohort": cohort})
    assert drifts.apart() > 1e-2


def test_l2gd_hovers_with_a_constant_step():
    assert FixedPoint(ft.L2GD(lam=0.5, lr=0.3, p=0.3), "Problem (2)", fixed_points.mild, 300).apart() > 0.06


@pytest.mark.slow
def test_al2sgd_takes_fewer_communications_than_l2gd_on_an_ill_conditioned_case():
    lam, top = 100.0, 1000.0
    same = fixed_points.ill_conditioned(0.0)  # a common minimiser: the only case where L2GD with a constant step converges
    fast, slow = ft.AL2SGD(lam=lam, mu=1.0, smoothness=top), ft.L2GD(lam=lam, lr=1 / (2 * (top + lam)), p=lam / (lam + top))

    def after(method, known, rounds):
        """(squared error, communications)"""
        run = ft.run(method, known.federation, rounds=rounds, **LINEAR)
        models = [run.predict(i, torch.eye(6, dtype=torch.float64)).numpy().ravel() for i in range(5)]
        error = sum(((m - w) ** 2).sum() for m, w in zip(models, known.personal, strict=True))
        return error, sum(r["bytes_up"] > 0 for r in run.history)

    def gain(method):
        """How much the logarithm of the error falls per communication."""
        (early, first), (late, second) = (after(method, same, rounds) for rounds in (1500, 3000))
        return np.log(early / late) / (second - first)

    assert gain(fast) > 1.3 * gain(slow)
    assert after(slow, fixed_points.ill_conditioned(), 5000)[0] > 1e-3  # minimisers differ: only AL2SGD+ gets there


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
