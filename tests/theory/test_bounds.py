"""CLUP's bounds against fractions by hand and against errors measured on data whose truth is known; the constants they need."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.engine.setup import build_task
from fedtailor.errors import InvalidArgument
from fedtailor.theory.bounds import (
    Setting,
    fedclup_plan,
    inverse_q1,
    optimal_bound,
    optimal_lam,
    optimization,
    q2,
    setting,
    setting_of,
    statistical,
    total,
)
from fedtailor.theory.constants import constants, estimate, loss_bound, noise, record_smoothness
from fedtailor.theory.dissimilarity import bounded, client_gradients, dissimilarity, diversity
from fedtailor.theory.envelope import solve, solve_path
from fedtailor.theory.rates import fedclup_rate, fedclup_steps
from tests.make import seeded

LAMS = list(np.geomspace(1e-3, 1e6, 19))
PLAIN = Setting(mu=1.0, L=1.0, rho2=2.0, R2=1.0, n=4, m=2)


def made(fed, bias=False):
    fed = fed.to(torch.float64)
    return build_task("linear", fed, 0, torch.float64, bias), fed


# -- by hand ----------------------------------------------------------------------------------------------------------------
def test_theorem_1_in_fractions():
    # mu = L = 1 and lam = 63: g = 4 (1/64 + 1/4096) = 65/1024, so g/(1 - 4 g) = 65/764; 4 R^2 + 2 rho^2/n = 5
    rest = Fraction(65, 764) * 5
    inverse = Fraction(12 * 5, 4096) + Fraction(48, 4096) * (rest + 16 * Fraction(2, 8) + 16) + 3 * rest
    assert inverse_q1(63.0, PLAIN) == pytest.approx(float(inverse), rel=1e-12)
    assert q2(63.0, PLAIN) == pytest.approx((2 + 4) * 63 + 8 * 63**2)
    bounds = statistical(63.0, PLAIN)
    assert bounds.shared == pytest.approx(48 * 2 / 8 + 51 + float(inverse))
    assert bounds.local == pytest.approx(2 + 6 * 63 + 8 * 63**2)
    assert bounds.bound == bounds.shared


def test_the_ends_of_theorem_1_are_the_local_and_the_pooled_rate():
    assert statistical(0.0, PLAIN).bound == pytest.approx(4 * 2 / 4)
    assert statistical(math.inf, PLAIN) == pytest.approx((48 * 2 / 8 + 51, 48 * 2 / 8 + 51, math.inf))


def test_the_first_branch_says_nothing_where_its_proof_does_not_hold():
    # 8 g(lam) = 32 (1/(1 + lam) + 1/(1 + lam)^2) is 1 at 1 + lam = 16 + sqrt(288)
    edge = 15 + math.sqrt(288)
    assert math.isinf(statistical(edge - 1e-6, PLAIN).shared)
    assert math.isfinite(statistical(edge + 1e-6, PLAIN).shared)


def test_q1_and_q2_grow_with_lam():
    for case in (PLAIN, Setting(0.5, 4.0, 3.0, 0.1, 50, 20)):
        first = np.array([inverse_q1(lam, case) for lam in LAMS])
        finite = first[np.isfinite(first)]
        assert len(finite) > 3
        assert (np.diff(finite) < 0).all()
        assert (np.diff([q2(lam, case) for lam in LAMS]) > 0).all()
    assert inverse_q1(1e12, PLAIN) < 1e-9
    assert q2(0.0, PLAIN) == 0


def test_corollary_1_by_hand():
    near = Setting(mu=1.0, L=2.0, rho2=4.0, R2=0.0, n=100, m=50)
    # (2 L^2 R^2 + rho^2/n)/(L^2 R^2 + rho^2/N) = m = 50 and 2 kappa v 5 = 5: 250 against 64 * 4 * 2 = 512
    assert optimal_lam(near) == ("shared", 511.0, math.inf)
    assert optimal_lam(near._replace(m=1000)).lam == pytest.approx(4999)
    far = near._replace(R2=0.25)
    assert optimal_lam(far) == ("local", 0.0, pytest.approx(4 / (100 * 0.25)))
    assert optimal_lam(far._replace(R2=0.01)).regime == "shared"  # R = 1/sqrt(n)
    c2 = max((1 + math.sqrt(3)) ** 2 * 4, 32 * 4)
    c4 = max(4 * (1 + math.sqrt(4 * c2 + 5)) ** 2, 198 * 4)
    assert optimal_bound(far) == pytest.approx(192 * 4 / 5000 + c4 / 100)
    assert optimal_bound(near) == pytest.approx(192 * 4 / 5000)


def test_at_corollary_1s_lam_theorem_1_applies_and_is_within_corollary_1s_bound():
    for kappa in (1.0, 3.0, 10.0):
        for R2 in (0.0, 1e-4, 1e-2):
            case = Setting(1.0, kappa, 2.0, R2, 100, 30)
            degree = optimal_lam(case)
            assert degree.regime == "shared"
            assert statistical(degree.lam, case).shared <= optimal_bound(case)


def test_corollary_2s_plan_by_hand():
    plan = fedclup_plan(2.0, 1.0, 4.0, epsilon=1e-3, start=5.0)
    assert (plan.lr, plan.server_lr, plan.steps) == fedclup_steps(2.0, 1.0, 4.0)
    assert plan.rate == pytest.approx(1 - 6 / (16 * 3))
    assert plan.rate**plan.rounds * 5 <= 1e-3 < plan.rate ** (plan.rounds - 1) * 5
    assert plan.gradients == plan.rounds * plan.steps
    assert fedclup_plan(2.0, 1.0, 4.0, epsilon=1.0, start=0.5).rounds == 0


def test_more_personal_models_need_fewer_rounds():
    rounds = [fedclup_plan(lam, 1.0, 20.0, 1e-6).rounds for lam in LAMS]
    assert (np.diff(rounds) >= 0).all()
    assert rounds[-1] == math.ceil(math.log(1e6) / -math.log(1 - 1 / 80))  # kappa = 20: 1 - 1/(4 kappa) in the end
    assert rounds[0] == math.ceil(math.log(1e6) / -math.log(fedclup_rate(LAMS[0], 1.0, 20.0)))


def test_the_total_error_falls_with_rounds_to_twice_the_statistical_one():
    case = Setting(1.0, 4.0, 1.0, 0.01, 100, 20)
    errors = [total(0.5, case, rounds, 10.0) for rounds in (0, 1, 10, 1000)]
    assert (np.diff(errors) < 0).all()
    assert errors[0] == pytest.approx(20 + 2 * statistical(0.5, case).bound)
    assert errors[-1] == pytest.approx(2 * statistical(0.5, case).bound)
    assert total(0.0, case, 0, 10.0) == pytest.approx(2 * 4 / 100)


# -- against what is measured -----------------------------------------------------------------------------------------------
def grid():
    """Thirty federations: conditioning, heterogeneity, noise and sizes."""
    for seed in range(5):
        for R in (0.0, 0.1, 1.0):
            for kappa, noise_level, clients, rows in ((1.0, 1.0, 20, 10), (4.0, 0.5, 6, 40)):
                yield {"R": R, "kappa": kappa, "noise": noise_level, "clients": clients, "rows": rows, "seed": seed, "d": 4}


@pytest.mark.slow
def test_theorem_1_lies_above_the_error_on_thirty_federations():
    tightest = math.inf
    for options in grid():
        task, fed = made(ft.Federation.load("clup-regression", **options, test_rows=4))
        truth = torch.stack([t["weight"] for t in fed.truth])
        R2 = float(((truth - truth.mean(0)) ** 2).sum((1, 2)).max())
        # E |X'e/n|^2 = noise^2 trace(X'X/n)/n, and the spectrum of X'X/n is even in log from 1 to kappa
        rho2 = options["noise"] ** 2 * np.logspace(0, math.log10(options["kappa"]), 4).sum()
        case = setting(1.0, options["kappa"], rho2, R2, options["rows"], options["clients"])
        lams = [0.0, 0.01, 0.1, 1.0, 10.0, 300.0, 1e4, math.inf]
        for lam, solution in zip(lams, solve_path(task, fed, lams), strict=True):
            models = torch.stack([m["weight"] for m in solution.models])
            error = float(((models - truth) ** 2).sum((1, 2)).mean())
            bound = statistical(lam, case).bound
            assert error <= bound
            tightest = min(tightest, bound / error)
    assert 1 < tightest < 100  # not a bound so large that it would hold for anything


@pytest.mark.parametrize("R", [0.0, 0.01, 0.5])
def test_corollary_1s_lam_keeps_corollary_1s_bound(R):
    for seed in range(4):
        task, fed = made(ft.Federation.load("clup-regression", clients=20, rows=20, d=4, kappa=2.0, R=R, noise=1.0, seed=seed))
        case = setting_of(task, fed)
        models = solve(task, fed, optimal_lam(case).lam).models
        errors = [float(((m["weight"] - t["weight"]) ** 2).sum()) for m, t in zip(models, fed.truth, strict=True)]
        assert np.mean(errors) <= optimal_bound(case)


@pytest.mark.parametrize(("lam", "kappa"), [(0.2, 3.0), (2.0, 3.0), (20.0, 8.0)])
def test_fedclup_with_the_theorys_steps_is_at_least_as_fast_as_corollary_2(lam, kappa):
    fed = ft.Federation.load("clup-regression", clients=5, rows=20, d=4, kappa=kappa, R=1.0, noise=0.3)
    task, exact = made(fed)
    solution = solve(task, exact, lam)
    known = constants(task, exact)
    assert (known.mu, known.smoothness) == pytest.approx((1, kappa))
    rate = fedclup_rate(lam, 1.0, kappa)
    own = torch.stack([m["weight"] for m in solution.models])
    prox = torch.stack([_prox(*exact.train.client(i), lam) for i in range(5)])  # at g = 0, from which all start
    starts = float((solution.g["weight"] ** 2).sum()), float((prox**2).sum(1).mean())
    errors = {}
    for rounds in (3, 6, 12):
        options = {"rounds": rounds, "bias": False, "dtype": "float64", "evaluate_every": 0, "engine": "vectorized"}
        run = ft.run(ft.FedCLUP(lam=lam, steps="theory"), fed, **options)
        errors[rounds] = float(((run.model()["weight"] - solution.g["weight"]) ** 2).sum())
        local = float(((torch.stack([run.model(i)["weight"] for i in range(5)]) - own) ** 2).sum((1, 2)).mean())
        assert errors[rounds] <= optimization(lam, 1.0, kappa, rounds, *starts)[0]
        assert local <= optimization(lam, 1.0, kappa, rounds - 1, *starts)[1]  # the clients last answered the g before
    assert (errors[6] / errors[3]) ** (1 / 3) <= rate
    assert errors[12] == 0 or (errors[12] / errors[6]) ** (1 / 6) <= rate


def _prox(x, y, lam):
    matrix = x.T @ x / len(y) + lam * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(matrix, x.T @ y / len(y))


# -- constants --------------------------------------------------------------------------------------------------------------
def test_noise_at_the_truth_by_hand():
    data = [([[1.0], [2.0]], [1.5, 1.0]), ([[1.0], [-1.0]], [0.0, 0.0])]
    task, fed = made(ft.Federation.from_arrays(data, data, task="regression", truth=[[1.0], [0.0]]))
    # slopes (w x - y) x of the first client at w = 1: -1/2 and 2; of the second none
    gradient_noise = noise(task, fed)
    assert (gradient_noise.rho2, gradient_noise.sigma2, gradient_noise.exact) == pytest.approx(((0.25 + 4) / 2, 1.25**2, True))
    elsewhere = noise(task, fed, [{"weight": torch.zeros(1, 1)}, {"weight": torch.ones(1, 1)}])
    assert elsewhere.exact is False
    assert (elsewhere.rho2, elsewhere.sigma2) == pytest.approx((max((1.5**2 + 2**2) / 2, 1), 0.25**2))


def test_smoothness_and_largest_loss_of_a_record_by_hand():
    data = [([[3.0, 0.0], [0.0, 4.0]], [1.0, -2.0])]
    task, fed = made(ft.Federation.from_arrays(data, data, task="regression"))
    assert record_smoothness(task, fed, 0.5) == pytest.approx(16.5)
    assert loss_bound(task, fed, 2.0) == pytest.approx((2 + 8) ** 2 / 2)
    data = [([[3.0, 4.0], [0.0, 1.0]], [1, 0])]
    task, fed = made(ft.Federation.from_arrays(data, data, task="classification"), bias=True)
    assert record_smoothness(task, fed) == pytest.approx(26 / 2)
    # the worst softmax is along the row: logits (s, -s) with s = |x|/sqrt(2) for a model of length 1
    assert loss_bound(task, fed, 1.0) == pytest.approx(math.log1p(math.exp(math.sqrt(2) * math.sqrt(26))))


def test_no_model_within_the_radius_has_a_larger_loss():
    draw = np.random.default_rng(1)
    for kind, aims in (("classification", [0, 2, 1]), ("regression", [1.0, -2.0, 0.5]), ("multilabel", [[0, 1], [1, 1], [0, 0]])):
        data = [(draw.normal(size=(3, 2)), np.array(aims))]
        task, fed = made(ft.Federation.from_arrays(data, data, task=kind))
        bound = loss_bound(task, fed, 1.5)
        for seed in range(200):
            weight = torch.randn(fed.outputs, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            weight *= 1.5 / weight.norm()
            assert float(task.example_loss(task.apply({"weight": weight}, fed.train.x), fed.train.y).max()) <= bound


def test_an_estimate_on_a_linear_model_finds_the_exact_extremes_and_says_that_it_is_none():
    task, fed = made(ft.Federation.load("clup-regression", clients=3, rows=20, d=4, kappa=5.0))
    curvature = estimate(task, fed, task.init(), weight_decay=0.1, steps=300)
    assert (curvature.mu, curvature.smoothness) == pytest.approx((1.1, 5.1), rel=1e-3)
    assert curvature.exact is False
    assert constants(task, fed).exact is True


def test_an_estimate_sees_the_saddle_of_a_network():
    fed = ft.Federation.load("clup-logistic", clients=2, rows=40, d=3).to(torch.float64)
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    task = build_task(module, fed, 0, torch.float64, True)
    model = task.init()
    curvature = estimate(task, fed, model, steps=300)

    def risk(vector, i):
        parts = torch.split(vector, [leaf.numel() for leaf in model.values()])
        x, y = fed.train.client(i)
        return task.risk({k: v.view_as(model[k]) for k, v in zip(model, parts, strict=True)}, {"x": x, "y": y})

    flat = torch.cat([leaf.reshape(-1) for leaf in model.values()])
    spectra = [torch.linalg.eigvalsh(torch.autograd.functional.hessian(lambda v, i=i: risk(v, i), flat)) for i in range(2)]
    assert min(float(s[0]) for s in spectra) < 0
    assert curvature.smoothness == pytest.approx(max(float(s[-1]) for s in spectra), rel=1e-3)
    assert curvature.mu == pytest.approx(min(float(s[0]) for s in spectra), rel=1e-2)
    assert curvature.exact is False


def test_setting_of_a_federation_by_hand():
    data = [([[1.0], [2.0]], [1.5, 1.0]), ([[1.0], [-1.0]], [0.0, 0.0])]
    task, fed = made(ft.Federation.from_arrays(data, data, task="regression", truth=[[1.0], [0.0]]))
    assert setting_of(task, fed) == pytest.approx((1.0, 2.5, 2.125, 0.25, 2, 2))
    with pytest.raises(InvalidArgument, match="true parameters"):
        setting_of(task, ft.Federation.from_arrays(data, data, task="regression").to(torch.float64))


# -- dissimilarity ----------------------------------------------------------------------------------------------------------
def test_dissimilarities_by_hand():
    data = [([[1.0]], [0.0]), ([[2.0]], [6.0])]
    task, fed = made(ft.Federation.from_arrays(data, data, task="regression"))
    points = [client_gradients(task, fed, {"weight": torch.full((1, 1), w, dtype=torch.float64)}) for w in (0.0, 2.0)]
    assert [p[:, 0].tolist() for p in points] == [[0.0, -12.0], [2.0, -4.0]]  # w and 4 (w - 3)
    assert [dissimilarity(p) for p in points] == pytest.approx([36, 9])
    assert bounded(points) == pytest.approx((36, 1))
    # mean square 72 against (grad f)^2 = 36, and 10 against 1
    assert bounded(points, B=1.2) == pytest.approx((72 - 1.44 * 36, 1.2))
    assert bounded(points, B=4.0) == (0.0, 4.0)
    assert diversity(points) == pytest.approx([36, 36])
    with_decay = client_gradients(task, fed, {"weight": torch.full((1, 1), 2.0, dtype=torch.float64)}, 0.5)
    assert with_decay[:, 0].tolist() == [3.0, -3.0]


def test_a_networks_gradients_are_measured_too():
    fed = ft.Federation.load("clup-logistic", clients=3, rows=20, d=3).to(torch.float64)
    task = build_task("mlp", fed, 0, torch.float64, True)
    slopes = client_gradients(task, fed, task.init())
    assert bounded([slopes])[0] == pytest.approx(float(diversity([slopes]).mean()))


# -- refusals ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: setting(0.0, 1.0, 1.0, 1.0, 10, 2), "mu must be greater than 0"),
        (lambda: setting(2.0, 1.0, 1.0, 1.0, 10, 2), "smaller than mu"),
        (lambda: setting(1.0, 1.0, math.nan, 1.0, 10, 2), "rho2 must be a finite"),
        (lambda: statistical(-1.0, PLAIN), "at least 0"),
        (lambda: total(math.inf, PLAIN, 3, 1.0), "finite lam"),
        (lambda: fedclup_plan(1.0, 1.0, 2.0, epsilon=0.0), "epsilon"),
        (lambda: bounded([]), "no gradients"),
        (lambda: bounded([torch.ones(2, 2)], B=0.5), "at least 1"),
        (lambda: diversity([]), "no gradients"),
    ],
)
def test_bad_numbers_are_refused_in_one_line(call, words):
    with pytest.raises(InvalidArgument, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_what_needs_a_linear_model_or_models_of_the_right_number_says_so():
    fed = ft.Federation.load("clup-logistic", clients=2, rows=20, d=3).to(torch.float64)
    task = build_task("mlp", fed, 0, torch.float64, True)
    with pytest.raises(InvalidArgument, match="'linear' only"):
        record_smoothness(task, fed)
    with pytest.raises(InvalidArgument, match="not a model of this task"):
        noise(task, fed)
    with pytest.raises(InvalidArgument, match="1 models for 2 clients"):
        noise(task, fed, [task.init()])
    assert noise(task, fed, [task.init()] * 2).exact is False
    linear, fed = made(fed)
    with pytest.raises(InvalidArgument, match="radius"):
        loss_bound(linear, fed, -1.0)
    with pytest.raises(InvalidArgument, match="steps"):
        estimate(linear, fed, linear.init(), steps=0)
