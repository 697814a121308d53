"""MINIMAX's bounds against numbers by hand, and its dichotomy against the measured crossover of FedAvg and local training."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.engine.setup import build_task
from fedtailor.errors import InvalidArgument
from fedtailor.metrics.truth import individual_excess_risk
from fedtailor.papers import minimax_theory as minimax
from fedtailor.theory.envelope import solve

EVEN = [25] * 4  # S = 1/25, S_2 = 1/100, C_p = 1 with equal weights


# -- by hand ----------------------------------------------------------------------------------------------------------------
def test_lower_bounds_by_hand():
    assert minimax.lower_average(d=10, m=5, N=500, R2=0.04) == pytest.approx(0.04 + 0.02)
    assert minimax.lower_average(d=10, m=5, N=500, R2=4.0) == pytest.approx(0.1 + 0.02)
    assert minimax.lower_client(d=10, n=50, N=500, R2=4.0, c=0.5) == pytest.approx(0.5 * (0.2 + 0.02))
    assert minimax.lower_average_risk(mu=0.5, beta=2.0, m=5, N=500, R2=0.01) == pytest.approx(0.5 * (0.01 + 0.004))
    assert minimax.lower_client_risk(mu=0.5, beta=2.0, n=100, N=500, R2=1.0) == pytest.approx(0.5 * (0.02 + 0.004))


def test_upper_bounds_of_the_baselines_by_hand():
    assert minimax.local_risk(mu=0.5, beta=2.0, loss=3.0, n=100) == pytest.approx(0.12)
    # p_i = n_i/N makes sum p_i^2/n_i = 1/N
    assert minimax.fedavg_average_risk(0.5, 2.0, 3.0, [100, 300], R2=0.1) == pytest.approx(12 / 400 + 0.2)
    even = minimax.fedavg_average_risk(0.5, 2.0, 3.0, [100, 300], R2=0.1, weights=[1, 1])
    assert even == pytest.approx(12 * (0.25 / 100 + 0.25 / 300) + 0.2)
    assert minimax.fedavg_client_risk(0.5, 2.0, 4.0, [100, 300], R2=0.1) == pytest.approx(32 / 400 + 32 * 0.1)
    both = minimax.dichotomy_average_risk(0.5, 2.0, 3.0, [100, 100], R2=10.0)
    assert both == pytest.approx(2 * 6 * 2 / 200 + 12 / 200)


def test_the_dichotomy_is_no_worse_than_twice_the_better_of_its_parts_and_above_the_lower_bound():
    mu, beta, loss, sizes = 0.5, 2.0, 3.0, [100] * 6
    for R2 in np.geomspace(1e-6, 10, 15):
        both = minimax.dichotomy_average_risk(mu, beta, loss, sizes, R2)
        parts = minimax.local_risk(mu, beta, loss, 100), minimax.fedavg_average_risk(mu, beta, loss, sizes, R2)
        assert both <= 2 * min(parts)
        assert both >= minimax.lower_average_risk(mu, beta, 6, 600, R2, c=0.5)


def test_regimes_lie_around_the_threshold():
    assert minimax.threshold(5, 500) == pytest.approx(0.01)
    assert [minimax.regime(R2, 5, 500) for R2 in (0.0, 0.003, 0.01, 0.029, 0.031, 4.0)] == [
        "shared",
        "shared",
        "between",
        "between",
        "local",
        "local",
    ]
    assert minimax.regime(0.031, 5, 500, c=10.0) == "shared"
    assert [minimax.regime(R2, 5, 500, width=1.0) for R2 in (0.0099, 0.0101)] == ["shared", "local"]


def test_fedproxs_lam_by_hand():
    # thresholds sqrt(S) = 1/5 and S_2/sqrt(S) = 1/20
    assert minimax.fedprox_lam(2.0, 1.0, EVEN) == (pytest.approx(2 / 25 / 16), "A")
    assert minimax.fedprox_lam(2.0, 0.1, EVEN) == (pytest.approx(2 * 0.2 / 1.6), "B")
    assert minimax.fedprox_lam(2.0, 0.01, EVEN) == (pytest.approx(2 * 0.04 / 0.16), "C")
    # 30 and 10 rows, equal weights: S = 1/15, S_2 = 1/30, C_p = 1; weights 3:1 of equal rows: S = 1/25, S_2 = 1/40, C_p = 6/5
    assert minimax.fedprox_lam(2.0, 1.0, [30, 10], weights=[1, 1]).lam == pytest.approx(2 / 15 / 16)
    assert minimax.fedprox_lam(2.0, 0.0, [25, 25], weights=[3, 1]).lam == pytest.approx(2 / 25 / (16 * 6 / 5 / 40))


def test_fedproxs_lam_grows_as_clients_become_alike_and_keeps_its_own_condition():
    for sizes, weights in ((EVEN, None), ([30, 50, 20], None), ([30, 50, 20], [1, 1, 1])):
        lams = [minimax.fedprox_lam(1.0, R, sizes, weights).lam for R in np.geomspace(1e-4, 10, 40)]
        assert (np.diff(lams) <= 1e-12).all()
        p = np.array(sizes) / np.sum(sizes) if weights is None else np.array(weights) / np.sum(weights)
        assert max(lams) * p.max() <= 1 / 16 * (1 + 1e-9)
    each = [minimax.fedprox_client_lam(1.0, R, 9, 900).lam for R in (0.0, 0.01, 0.05, 0.0999, 0.2)]
    assert each[0] == pytest.approx(3 / 16)
    assert each[-1] == pytest.approx(0.01 / 16)
    assert (np.diff(each) < 0).all()


def test_fedproxs_risks_by_hand():
    assert minimax.fedprox_average_risk(2.0, 4.0, 3.0, 0.4, EVEN, R2=0.5) == pytest.approx(12 / 2.4 / 25 + 0.1)
    assert minimax.fedprox_best_average_risk(2.0, 4.0, 3.0, EVEN, R=0.1) == pytest.approx((2 + 6) * (0.1 / 5 + 0.01))
    assert minimax.fedprox_best_average_risk(2.0, 4.0, 3.0, EVEN, R=9.0) == pytest.approx((2 + 6) * (0.04 + 0.01))
    wanted = ((2 + 0.5) * (12 + (16 + 16 + 1) / 4) + 2 * 9) * (0.01 + 2 / 400)
    assert minimax.fedprox_best_client_risk(2.0, 4.0, 3.0, 1.0, 3.0, 100, 4, 400, R=1.0) == pytest.approx(wanted)


@pytest.mark.parametrize("R", [0.001, 0.08, 0.5, 3.0])
def test_theorem_11_follows_from_proposition_23_at_its_lam(R):
    mu, beta, loss = 1.0, 2.0, 3.0
    at = minimax.fedprox_average_risk(mu, beta, loss, minimax.fedprox_lam(mu, R, EVEN).lam, EVEN, R**2)
    assert at <= minimax.fedprox_best_average_risk(mu, beta, loss, EVEN, R, c=16.0)  # the 16 of its lam


def test_fedproxs_steps_by_hand():
    assert [minimax.fedprox_local_lr(1.0, 3.0, k) for k in (0, 1)] == [0.25, 0.125]
    assert [minimax.fedprox_server_lr(1.0, 2.0, t) for t in (0, 2)] == [3.0, 1.0]
    # beta^2 D^2 = 16, 2 lam loss = 12, lam^2 D^2 = 4: K_0 >= 20 * 1 * 16/4 - 1
    assert minimax.fedprox_local_steps(1.0, 2.0, 6.0, 2.0, 1.0, 0) == 79
    assert minimax.fedprox_distance(1.0, 2.0, 6.0, 2.0, 1.0, 9, [1, 1, 2]) == pytest.approx(12 * 4 * 3 * 6 / 16 * 4 / 10)


def test_the_average_excess_risk_weighs_the_individual_ones():
    assert minimax.average_excess_risk([1.0, 4.0]) == pytest.approx(2.5)
    assert minimax.average_excess_risk([1.0, 4.0], weights=[3, 1]) == pytest.approx(1.75)


# -- measured ---------------------------------------------------------------------------------------------------------------
def excess(fed, lam):
    """AER of the exact minimum at lam, on the test rows."""
    fed = fed.to(torch.float64)
    task = build_task("linear", fed, 0, torch.float64, False)
    models = solve(task, fed, lam).models
    batches = [dict(zip("xy", fed.test.client(i), strict=True)) for i in range(len(fed))]
    losses = np.array([float(task.risk(dict(m), b)) for m, b in zip(models, batches, strict=True)])
    return minimax.average_excess_risk(individual_excess_risk(task, fed, losses))


def crossover(name, clients, rows, guess, seeds, **options):
    """Where AER of FedAvg minus that of local training, a line in R^2, is zero."""
    points, gaps = [], []
    for share in (0.4, 1.0, 1.6):
        for seed in range(seeds):
            R = math.sqrt(share * guess / rows)
            fed = ft.Federation.load(name, clients=clients, rows=rows, R=R, seed=seed, test_rows=500, **options)
            truth = torch.stack([t["weight"][-1] - t["weight"][0] * (len(t["weight"]) - 1) for t in fed.truth]).double()
            points.append(float(((truth - truth.mean(0)) ** 2).sum(1).mean()))
            gaps.append(excess(fed, math.inf) - excess(fed, 0.0))
    slope, start = np.polyfit(points, gaps, 1)
    return -start / slope


GRID = ((5, 60), (5, 240), (15, 60), (15, 240))


@pytest.mark.slow
def test_fedavg_and_local_training_cross_where_r2_is_of_the_order_of_m_over_n():
    """Least squares with unit noise: local training's risk is about d/(2 n) and the pooled one's about R^2/2, so c is about d."""
    crossovers = np.array([crossover("clusters", m, n, 5.0, 5, groups=1, distance=0.0, noise=1.0, d=5) * n for m, n in GRID])
    assert crossovers.min() > 5 / 1.5
    assert crossovers.max() < 5 * 1.5


@pytest.mark.slow
def test_the_crossover_of_the_papers_logistic_design_scales_alike():
    crossovers = np.array(
        [crossover("minimax-logistic", m, n, 35.0, 10, d=4) for m, n in ((5, 100), (5, 400), (15, 100), (15, 400))]
    )
    sizes = np.array([100, 400, 100, 400])
    slope = np.polyfit(np.log(sizes), np.log(crossovers), 1)[0]
    assert -1.4 < slope < -0.7  # R^2 ~ 1/n = m/N
    constants = crossovers * sizes
    assert constants.max() < 2 * constants.min()


# -- refusals ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: minimax.lower_average(0, 5, 500, 1.0), "d must be greater than 0"),
        (lambda: minimax.lower_average(3, 5, 500, math.nan), "R2 must be a finite"),
        (lambda: minimax.local_risk(0.5, 2.0, 3.0, 10), "at least 16, not 10"),
        (lambda: minimax.local_risk(3.0, 2.0, 3.0, 10), "smaller than mu"),
        (lambda: minimax.fedavg_average_risk(0.5, 2.0, 3.0, [1, 1], 0.1), "n_i/p_i of at least 16"),
        (lambda: minimax.fedavg_average_risk(0.5, 2.0, 3.0, [0, 100], 0.1), "sizes must be at least 1"),
        (lambda: minimax.fedprox_lam(1.0, 1.0, "rows"), "sizes must be numbers"),
        (lambda: minimax.fedprox_lam(1.0, 1.0, [10, 10], [1]), "weights must be 2 numbers"),
        (lambda: minimax.fedprox_average_risk(2.0, 4.0, 3.0, 1.0, EVEN, 0.5), "use a smaller lam"),
        (lambda: minimax.fedprox_server_lr(1.0, 0.0, 3), "needs lam > 0"),
        (lambda: minimax.fedprox_distance(1.0, 2.0, 6.0, 2.0, 0.0, 9, [1, 1]), "needs lam > 0"),
        (lambda: minimax.regime(0.1, 5, 500, width=0.5), "width"),
        (lambda: minimax.average_excess_risk([]), "individual must be finite numbers"),
    ],
)
def test_bad_numbers_are_refused_in_one_line(call, words):
    with pytest.raises(InvalidArgument, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)
