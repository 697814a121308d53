"""R^2 from one exchange: values by hand, unbiasedness and coverage by Monte Carlo, poor clients, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

import fedtailor as ft
from fedtailor.errors import FedtailorError, InvalidArgument, InvalidData
from fedtailor.models import linear
from fedtailor.task import Task
from fedtailor.theory.fits import Summary, summary
from fedtailor.theory.heterogeneity import estimate, linear_task, measure, on_features, summaries


def model(kind: str, d: int, outputs: int = 1, bias: bool = False) -> Task:
    return Task.from_module(linear(d, outputs, bias=bias).double(), kind)


def means(draw: np.random.Generator, truth: np.ndarray, n: int) -> list[Summary]:
    """Clients whose parameter is the mean of n numbers of variance 1."""
    task = model("mse", 1)
    return [summary(task, np.ones((n, 1)), w + draw.normal(size=n), name=str(i)) for i, w in enumerate(truth)]


# -- by hand ----------------------------------------------------------------------------------------------------------------
def test_a_clients_mean_and_its_noise_by_hand():
    fit = summary(model("mse", 1), np.ones((5, 1)), np.array([1.0, 2.0, 3.0, 4.0, 10.0]))
    assert fit.parameters == pytest.approx([4.0])
    assert fit.noise == pytest.approx((9 + 4 + 1 + 0 + 36) / 4 / 5)  # s^2/n
    assert (fit.n, fit.ridge, fit.flags) == (5, 0.0, ())


def test_r2_of_three_means_by_hand():
    y = np.array([-1.0, 1.0, -1.0, 1.0, 0.0])  # mean 0, s^2 = 1, so s^2/n = 1/5
    task = model("mse", 1)
    r2_estimate = estimate([summary(task, np.ones((5, 1)), y + shift, name=str(shift)) for shift in (0.0, 3.0, 6.0)])
    # mean squared distance (9 + 0 + 9)/3 = 6, of which noise makes (1 - 1/3)/5
    assert r2_estimate.unbiased == pytest.approx(6 - 2 / 15)
    assert r2_estimate.r2 == r2_estimate.unbiased
    assert r2_estimate.population == pytest.approx(1.5 * r2_estimate.unbiased)
    assert r2_estimate.noise == pytest.approx(0.2)
    assert not r2_estimate.zero
    # a client's distance to the mean has the noise (1 - 2/3)/5 + 3/5/9
    assert [c.r2 for c in r2_estimate.per_client] == pytest.approx([9 - 2 / 15, 0.0, 9 - 2 / 15])
    assert (r2_estimate.n, r2_estimate.d, r2_estimate.m) == (5, 1, 3)


def test_less_spread_than_noise_is_zero_with_an_upper_end():
    y = np.array([-1.0, 1.0, -1.0, 1.0, 0.0])
    r2_estimate = estimate([summary(model("mse", 1), np.ones((5, 1)), y)] * 4)
    assert r2_estimate.unbiased == pytest.approx(-0.75 * 0.2)
    assert (r2_estimate.r2, r2_estimate.interval[0], r2_estimate.zero) == (0.0, 0.0, True)
    assert r2_estimate.interval[1] > 0.01


def test_data_without_noise_give_r2_itself():
    draw = np.random.default_rng(0)
    truth = draw.normal(size=(6, 3))
    rows = [draw.normal(size=(20, 3)) for _ in truth]
    r2_estimate = estimate([summary(model("mse", 3), x, x @ w) for x, w in zip(rows, truth, strict=True)])
    r2 = ((truth - truth.mean(0)) ** 2).sum(1).mean()
    assert r2_estimate.r2 == pytest.approx(r2)
    assert r2_estimate.interval == pytest.approx((r2, r2), rel=1e-3)


def test_a_bias_and_several_outputs_are_fitted_as_lstsq_does():
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(40, 3)), draw.normal(size=(40, 2))
    fit = summary(model("mse", 3, 2, bias=True), x, y)
    rows = np.hstack([x, np.ones((40, 1))])
    wanted, squares = np.linalg.lstsq(rows, y)[:2]
    assert fit.parameters.reshape(2, 4) == pytest.approx(wanted.T)
    assert fit.noise == pytest.approx(squares.sum() / 36 * np.trace(np.linalg.inv(rows.T @ rows)))


def test_a_logistic_fit_maximises_the_likelihood_with_jeffreys_penalty():
    draw = np.random.default_rng(2)
    x = draw.normal(size=(30, 2))
    y = (draw.random(30) < 1 / (1 + np.exp(-x @ [1.0, -0.5]))).astype(int)

    def loss(w: np.ndarray) -> float:
        z = x @ w
        p = 1 / (1 + np.exp(-z))
        information = (x * (p * (1 - p))[:, None]).T @ x
        return float(np.logaddexp(0, z).sum() - z @ y - np.linalg.slogdet(information)[1] / 2)

    best = minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12, "maxiter": 2000}).x
    fit = summary(model("cross_entropy", 2, 2), x, y)
    # as a softmax w is (-w/2, w/2), of length |w|/sqrt(2)
    assert np.abs(fit.parameters) == pytest.approx(np.abs(best) / math.sqrt(2), abs=1e-4)
    labels = np.stack([y, 1 - y], 1)
    both = summary(model("bce", 2, 2), x, labels).parameters.reshape(2, 2)
    assert both == pytest.approx(np.stack([best, -best]), abs=1e-4)


def test_a_softmax_fit_maximises_the_likelihood_with_jeffreys_penalty_whatever_is_added_to_all_classes():
    draw = np.random.default_rng(3)
    x = draw.normal(size=(40, 2))
    y = (x @ draw.normal(size=(2, 3)) + draw.gumbel(size=(40, 3))).argmax(1)

    def loss(free: np.ndarray) -> float:
        z = np.hstack([np.zeros((40, 1)), x @ free.reshape(2, 2).T])
        logs = z - np.logaddexp.reduce(z, 1)[:, None]
        p = np.exp(logs)[:, 1:]
        weights = np.einsum("na,ab->nab", p, np.eye(2)) - np.einsum("na,nb->nab", p, p)
        information = np.einsum("nab,ni,nj->aibj", weights, x, x).reshape(4, 4)
        return float(-logs[np.arange(40), y].sum() - np.linalg.slogdet(information)[1] / 2)

    options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 8000, "maxfev": 8000}
    best = minimize(loss, np.zeros(4), method="Nelder-Mead", options=options).x.reshape(2, 2)
    weights = np.vstack([np.zeros(2), best])
    wanted = ((weights - weights.mean(0)) ** 2).sum()
    fit = summary(model("cross_entropy", 2, 3), x, y)
    assert (fit.parameters**2).sum() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
def test_a_robust_covariance_sees_noise_that_grows_with_the_features():
    draw = np.random.default_rng(4)
    fits, plain, robust = [], [], []
    for _ in range(300):
        x = draw.normal(size=(60, 1))
        y = x[:, 0] * draw.normal(size=60)
        fits.append(summary(model("mse", 1), x, y).parameters[0])
        plain.append(summary(model("mse", 1), x, y).noise)
        robust.append(summary(model("mse", 1), x, y, robust=True).noise)
    truth = np.var(fits)  # about 3/60: the fourth moment of x; the model says 1/60
    assert np.mean(robust) == pytest.approx(truth, rel=0.2)
    assert np.mean(plain) < 0.5 * truth


# -- Monte Carlo ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("r", [0.0, 0.5])
@pytest.mark.slow
def test_r2_of_means_is_unbiased(r):
    draw = np.random.default_rng(5)
    truth = r * draw.normal(size=8)
    estimates = [estimate(means(draw, truth, 6)).unbiased for _ in range(200)]
    assert np.mean(estimates) == pytest.approx(truth.var(), abs=3.5 * np.std(estimates) / math.sqrt(200))


@pytest.mark.slow
def test_r2_of_regressions_with_unequal_rows_and_noise_is_unbiased():
    draw = np.random.default_rng(6)
    truth = 0.4 * draw.normal(size=(6, 3))
    task, estimates = model("mse", 3), []
    for _ in range(200):
        sent = []
        for i, w in enumerate(truth):
            x = draw.normal(size=(15 + 10 * i, 3))
            sent.append(summary(task, x, x @ w + (0.5 + i / 3) * draw.normal(size=len(x))))
        estimates.append(estimate(sent).unbiased)
    r2 = ((truth - truth.mean(0)) ** 2).sum(1).mean()
    assert np.mean(estimates) == pytest.approx(r2, abs=3.5 * np.std(estimates) / math.sqrt(200))


def covered(kind: str, d: int, n: int, m: int, r: float, cases: int) -> tuple[int, int, list[float], float]:
    """(how often the interval holds the truth, how often zero is said, relative errors of R, covered single distances)."""
    draw = np.random.default_rng([d, n, m, int(100 * r)])
    outputs = {"mse": 1, "cross_entropy": 2}[kind]
    task, hits, zeros, errors, singles = model(kind, d, outputs), 0, 0, [], []
    for _ in range(cases):
        truth = draw.normal(size=d) / math.sqrt(d) + r * draw.normal(size=(m, d)) / math.sqrt(d)
        sent = []
        for i, w in enumerate(truth):
            x = draw.normal(size=(n, d))
            y = x @ w + draw.normal(size=n) if kind == "mse" else (draw.random(n) < 1 / (1 + np.exp(-x @ w))).astype(int)
            sent.append(summary(task, x, y, name=str(i)))
        own = ((truth - truth.mean(0)) ** 2).sum(1) / outputs  # as a softmax, w is (-w/2, w/2)
        r2_estimate = estimate(sent)
        hits += r2_estimate.interval[0] - 1e-12 <= own.mean() <= r2_estimate.interval[1]
        zeros += r2_estimate.zero
        errors.append(abs(math.sqrt(r2_estimate.r2) / math.sqrt(own.mean()) - 1) if r else 0.0)
        singles += [c.low - 1e-12 <= o <= c.high for c, o in zip(r2_estimate.per_client, own, strict=True)]
    return hits, zeros, errors, float(np.mean(singles))


@pytest.mark.parametrize(
    ("d", "n", "m"),
    [*(pytest.param(*size, marks=pytest.mark.slow) for size in ((2, 10, 20), (5, 25, 10))), (10, 100, 5)],
)
@pytest.mark.parametrize("times", [0.0, 1.0, 4.0])
def test_the_interval_of_least_squares_covers_the_truth(d, n, m, times):
    noise = d / (n - d - 1)
    hits, zeros, errors, singles = covered("mse", d, n, m, math.sqrt(times * noise), 100)
    assert 83 <= hits <= 100  # 90, or 95 where the truth is near 0; +-3 by chance
    assert 0.85 <= singles <= 0.99
    if not times:
        assert zeros >= 90
    if times == 4 and m >= 20:
        assert np.mean(errors) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize(("d", "n", "m", "cases"), [(3, 60, 10, 20), (5, 100, 20, 8)])
@pytest.mark.parametrize("times", [0.0, 1.0, 4.0])
def test_the_interval_of_logistic_fits_covers_the_truth(d, n, m, cases, times):
    noise = 2 * 4 * d / n  # about; in the length of w
    hits, zeros, errors, _ = covered("cross_entropy", d, n, m, math.sqrt(times * noise), cases)
    assert hits >= 0.9 * cases - 3 * math.sqrt(0.09 * cases)
    if not times:
        assert zeros >= 0.9 * cases - 1
    if times == 4 and m >= 20:
        assert np.mean(errors) < 0.15


# -- poor clients -----------------------------------------------------------------------------------------------------------
def poor(kind: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(7)
    x = draw.normal(size=(30, 4))
    y = x[:, 0] + draw.normal(size=30) if kind == "mse" else draw.integers(0, 3, 30)
    one = np.zeros(30) if kind == "mse" else np.zeros(30, int)
    constant, collinear = x.copy(), x.copy()
    constant[:, 1], collinear[:, 1] = 2.0, 3 * x[:, 0]
    return {
        "one class": (x, one),
        "one row": (x[:1], y[:1]),
        "two rows": (x[:2], y[:2]),
        "constant": (constant, y),
        "collinear": (collinear, y),
        "nothing": (np.zeros((30, 4)), y),
        "separable": (x, (x[:, 0] > 0) * 1),
        "huge": (1e6 * x, y),
        "tiny": (1e-6 * x, y),
    }


@pytest.mark.parametrize("kind", ["mse", "cross_entropy"])
@pytest.mark.parametrize("robust", [False, True])
def test_poor_clients_give_finite_summaries_with_a_flag(kind, robust):
    task = model(kind, 4, 1 if kind == "mse" else 3, bias=True)
    for name, (x, y) in poor(kind).items():
        fit = summary(task, x, y, name=name, robust=robust)
        assert np.isfinite([*fit.parameters, *fit.covariance.ravel(), fit.noise, fit.variance, fit.square]).all(), name
        expected = {"one class", "separable"} if kind == "cross_entropy" else set()
        assert bool(fit.flags) == (name in expected | {"one row", "two rows", "constant", "collinear", "nothing"}), name
        for partner in (fit, summary(task, *poor(kind)["tiny"])):
            together = estimate([fit, partner])
            assert np.isfinite([together.r2, *together.interval, together.noise, *(c.high for c in together.per_client)]).all()
            json.dumps(together.json(), allow_nan=False)


def test_more_features_than_rows_everywhere_is_an_order_of_magnitude():
    draw = np.random.default_rng(8)
    rows = [draw.normal(size=(5, 12)) for _ in range(6)]
    r2_estimate = estimate([summary(model("mse", 12), x, draw.normal(size=5)) for x in rows])
    assert r2_estimate.m == 6
    assert "order of magnitude" in r2_estimate.trusted
    assert math.isfinite(r2_estimate.interval[1])


def test_fewer_than_five_rows_per_parameter_are_said():
    draw = np.random.default_rng(9)
    sent = [summary(model("mse", 6), draw.normal(size=(n, 6)), draw.normal(size=n)) for n in (20, 60, 60)]
    assert estimate(sent).trusted.startswith("1 of 3 clients have fewer than 5 rows per parameter")
    assert "about nine times in ten" in estimate(sent[1:]).trusted


def test_a_client_with_too_little_data_is_left_out_and_named():
    draw = np.random.default_rng(10)
    sent = means(draw, np.zeros(4), 10)
    wide = [summary(model("mse", 2), draw.normal(size=(n, 2)), draw.normal(size=n), name=f"{n} rows") for n in (20, 21, 22, 1)]
    r2_estimate = estimate(wide)
    assert r2_estimate.left_out == ("1 rows",)
    assert r2_estimate.m == 3
    assert r2_estimate.trusted.startswith("1 of 4 clients have too little data to compare and are left out.")
    assert estimate(sent).left_out == ()


def test_a_constant_column_beside_a_bias_changes_nothing_but_is_said():
    draw = np.random.default_rng(11)
    x, y = draw.normal(size=(40, 2)), draw.normal(size=40)
    plain = summary(model("mse", 2, bias=True), x, y)
    more = summary(model("mse", 3, bias=True), np.hstack([x, np.ones((40, 1))]), y)
    # the intercept is shared equally by the two columns of ones
    assert more.parameters == pytest.approx([*plain.parameters[:2], plain.parameters[2] / 2, plain.parameters[2] / 2])
    assert more.flags == ("1 of 4 input directions left at zero",)


# -- federations ------------------------------------------------------------------------------------------------------------
def test_only_training_rows_are_used():
    fed = ft.Federation.load("clup-regression", clients=4, rows=30, d=3, R=0.5, noise=1.0)
    other = replace(fed, test=replace(fed.test, x=fed.test.x + 100))
    assert measure(linear_task(fed), fed).json() == measure(linear_task(fed), other).json()


def test_the_order_of_clients_changes_nothing_and_names_stay():
    fed = ft.Federation.load("clup-logistic", clients=4, rows=60, d=3, R=0.5)
    turned = fed.take([2, 0, 3, 1])
    a, b = measure(linear_task(fed), fed), measure(linear_task(turned), turned)
    assert b.r2 == pytest.approx(a.r2)
    assert b.interval == pytest.approx(a.interval)
    assert {c.name: pytest.approx(c.r2) for c in a.per_client} == {c.name: c.r2 for c in b.per_client}


def test_the_same_seed_gives_the_same_summary():
    fed = ft.Federation.load("clup-logistic", clients=2, rows=40, d=3)
    task = linear_task(fed)
    first, again, other = (summaries(task, fed, seed=seed)[0].noise for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_features_of_a_network_are_what_its_last_layer_sees():
    fed = ft.Federation.load("clup-logistic", clients=3, rows=80, d=5, R=1.0)
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    task = Task.from_module(module)
    seen = on_features(task, task.init(), fed)
    with torch.no_grad():
        assert torch.allclose(seen.train.x, module[:2](fed.train.x))
        assert torch.allclose(seen.test.x, module[:2](fed.test.x))
    assert torch.equal(seen.train.y, fed.train.y)
    assert seen.truth is None
    assert math.isfinite(measure(linear_task(seen), seen).r2)


# -- refusals ---------------------------------------------------------------------------------------------------------------
X, Y = np.eye(3), np.array([0.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: summary(Task.from_module(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))), X, Y), "on_features"),
        (lambda: summary(model("mse", 3), X, Y[:2]), "one y per row"),
        (lambda: summary(model("mse", 2), X, Y), "rows? of 2 features"),
        (lambda: summary(model("mse", 3), X[:0], Y[:0]), "at least one row"),
        (lambda: summary(model("mse", 3), X * np.nan, Y), "not finite"),
        (lambda: summary(model("mse", 3), [["a", "b", "c"]], [1.0]), "array of numbers"),
        (lambda: summary(model("mse", 3, 2), X, Y), "1 numbers per row, the model 2"),
        (lambda: summary(model("cross_entropy", 3, 2), X, Y), "classes 0 to 1"),
        (lambda: summary(model("mse", 3), X, Y, draws=1), "at least 2"),
        (lambda: summary(model("mse", 2000), np.ones((3, 2000)), Y), "too many for a covariance"),
        (lambda: estimate([summary(model("mse", 3), X, Y)]), "at least two"),
        (lambda: estimate([summary(model("mse", 3), X, Y), summary(model("mse", 1), X[:, :1], Y)]), "different sizes"),
        (lambda: estimate(["a", "b"]), "list of summaries"),
    ],
)
def test_what_cannot_be_estimated_is_refused_in_one_line(call, words):
    with pytest.raises(FedtailorError, match=words) as refused:
        call()
    assert isinstance(refused.value, (InvalidArgument, InvalidData))
    assert "\n" not in str(refused.value)


# -- columns that a client cannot tell apart ------------------------------------------------------------------------------
def test_a_column_that_is_constant_at_each_client_is_told_by_the_clients_together():
    """Every client has one value of the second column: alone it cannot tell its weight from the constant's, together they can."""
    hits, errors = 0, []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        levels, slopes = draw.uniform(-1, 1, size=30), 1.0 + 0.3 * draw.normal(size=30)
        rows = []
        for level, slope in zip(levels, slopes, strict=True):
            x = np.column_stack([draw.normal(size=40), np.full(40, level)])
            rows.append((x, slope * x[:, 0] + 2.0 * level + 5.0 + 0.5 * draw.normal(size=40)))
        fed = ft.Federation.from_arrays(rows, rows, task="regression")
        r2_estimate = measure(linear_task(fed), fed)
        truth = float(slopes.var())  # nothing else differs
        hits += r2_estimate.interval[0] <= truth <= r2_estimate.interval[1]
        errors.append(r2_estimate.unbiased - truth)
    assert hits >= 14  # of 20 at nine in ten: fewer in two cases of a thousand
    assert abs(np.mean(errors)) < 3 * np.std(errors) / np.sqrt(20)
    assert (r2_estimate.d, r2_estimate.load) == (3, 2)
    assert "common to all" in r2_estimate.trusted


def test_units_of_a_constant_column_make_no_difference_where_nothing_differs():
    """A school's mean close to zero is no reason for a large weight."""
    draw = np.random.default_rng(5)
    rows = []
    for level in np.linspace(-0.01, 2, 30):
        x = np.column_stack([draw.normal(size=50), np.full(50, level)])
        rows.append((x, x[:, 0] + 12.0 + draw.normal(size=50)))
    fed = ft.Federation.from_arrays(rows, rows, task="regression")
    r2_estimate = measure(linear_task(fed), fed)
    assert r2_estimate.zero
    assert r2_estimate.interval[1] < 0.2  # the noise of a fit is 2/50


def test_mixed_effects_models_agree():
    """Random slopes and intercepts: the trace of their covariance, found by REML, is the population's R^2."""
    regression = pytest.importorskip("statsmodels.regression.mixed_linear_model", reason="statsmodels is not installed")
    draw = np.random.default_rng(6)
    m, n, scatter = 60, 25, np.array([0.5, 0.3, 0.4])
    rows = []
    for w in np.array([1.0, -1.0, 0.5]) + scatter * draw.normal(size=(m, 3)):
        x = draw.normal(size=(n, 2))
        rows.append((x, x @ w[:2] + w[2] + draw.normal(size=n)))
    fed = ft.Federation.from_arrays(rows, rows, task="regression")
    r2_estimate = measure(linear_task(fed), fed)
    design = np.column_stack([np.concatenate([x for x, _ in rows]), np.ones(m * n)])
    fit = regression.MixedLM(np.concatenate([y for _, y in rows]), design, np.repeat(np.arange(m), n), design).fit()
    assert r2_estimate.population == pytest.approx(float(np.trace(fit.cov_re)), rel=0.15)
    assert r2_estimate.interval[0] <= float(np.trace(fit.cov_re)) * (1 - 1 / m) <= r2_estimate.interval[1]
