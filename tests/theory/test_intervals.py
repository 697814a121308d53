"""How far apart clients are, from one exchange: R² and its interval against known truths, and groups of clients."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.theory import clusters, heterogeneity


def drawn(draw, truth, n, logistic=False):
    def rows(w, count):
        x = draw.normal(size=(count, len(w)))
        return x, (draw.random(count) < 1 / (1 + np.exp(-x @ w))) * 1 if logistic else x @ w + draw.normal(size=count)

    return ft.Federation.from_arrays([rows(w, n) for w in truth], [rows(w, 2) for w in truth])


def received(fed, bias=False):
    return heterogeneity.summaries(heterogeneity.linear_task(fed, bias=bias), fed)


def test_r2_is_the_spread_of_the_fits_less_what_noise_alone_makes():
    """By hand, least squares: the fits, s² (X'X)^-1 with n - d degrees of freedom, and (1 - 1/m) of its mean trace."""
    draw = np.random.default_rng(0)
    fed = drawn(draw, draw.normal(size=(6, 3)), 40)
    fits, traces = [], []
    for i in range(6):
        x, y = (part.double().numpy() for part in fed.train.client(i))
        w = np.linalg.solve(x.T @ x, x.T @ y)
        fits.append(w)
        traces.append(((y - x @ w) ** 2).sum() / 37 * np.trace(np.linalg.inv(x.T @ x)))
    spread = ((np.array(fits) - np.mean(fits, 0)) ** 2).sum(1).mean()
    estimate = heterogeneity.estimate(received(fed))
    assert estimate.noise == pytest.approx(np.mean(traces), rel=1e-6)
    assert estimate.unbiased == pytest.approx(spread - 5 / 6 * np.mean(traces), rel=1e-6)
    assert estimate.population == pytest.approx(6 / 5 * estimate.unbiased, rel=1e-6)
    json.dumps(estimate.json(), allow_nan=False)


@pytest.mark.slow
@pytest.mark.parametrize("logistic", [False, True])
def test_the_interval_holds_the_truth_about_nine_times_in_ten(logistic):
    draw = np.random.default_rng(1)
    cases, hits, zeros = 60, 0, 0
    for _ in range(cases):
        truth = draw.normal(size=3) + draw.normal(size=(10, 3)) * (0.5 if logistic else 0.2)
        r2 = ((truth - truth.mean(0)) ** 2).sum(1).mean() * (0.5 if logistic else 1)  # as a softmax, w is (-w/2, w/2)
        low, high = heterogeneity.estimate(received(drawn(draw, truth, 50, logistic))).interval
        hits += low <= r2 <= high
        alike = np.tile(draw.normal(size=3), (10, 1))
        zeros += heterogeneity.estimate(received(drawn(draw, alike, 50, logistic))).zero
    # 90 % expected; four standard errors of 60 cases below that, by the binomial law
    assert hits >= cases * 0.9 - 4 * np.sqrt(cases * 0.09)
    assert zeros >= cases * 0.9 - 4 * np.sqrt(cases * 0.09)


@pytest.mark.slow
def test_groups_are_found_where_there_are_some_and_only_there():
    draw = np.random.default_rng(2)
    centers = np.array([[4.0, 0, 0], [0, 4.0, 0], [0, 0, 4.0]])
    right = alike = spread = 0
    for _ in range(6):
        grouped = clusters.find(received(drawn(draw, centers[np.arange(15) % 3] + 0.2 * draw.normal(size=(15, 3)), 40)))
        right += grouped.k == 3 and all(len({grouped.labels[i] for i in range(g, 15, 3)}) == 1 for g in range(3))
        alike += clusters.find(received(drawn(draw, np.ones((15, 3)), 40))).k == 1
        spread += clusters.find(received(drawn(draw, draw.normal(size=(15, 3)), 40))).k == 1
    assert right >= 5
    assert alike >= 5
    assert spread >= 5


def test_poor_clients_are_finite_or_left_out_and_said():
    draw = np.random.default_rng(3)
    x = draw.normal(size=(30, 4))
    good = [(x, (x[:, 0] + draw.normal(size=30) > 0) * 1) for _ in range(3)]
    poor = [(x[:1], np.array([1])), (x, np.ones(30, int)), (np.ones((30, 4)), good[0][1]), (x[:3], np.array([0, 1, 0]))]
    fed = ft.Federation.from_arrays([*good, *poor], [*good, *poor])
    estimate = heterogeneity.estimate(received(fed, bias=True))
    assert np.isfinite([estimate.r2, *estimate.interval, estimate.noise]).all()
    assert estimate.trusted
    json.dumps(estimate.json(), allow_nan=False)
