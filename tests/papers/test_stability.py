"""Federated stability: means worked out by hand, and Proposition 21 above what replacing records really does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.engine.setup import build_task
from fedtailor.errors import InvalidArgument
from fedtailor.papers.stability import (
    envelope_solver,
    fedavg_stability,
    federated_stability,
    fedprox_stability,
    local_stability,
    replace_record,
)
from fedtailor.theory.constants import constants, loss_bound, record_smoothness
from fedtailor.theory.envelope import solve


def made(fed, bias=False):
    fed = fed.to(torch.float64)
    return build_task("linear", fed, 0, torch.float64, bias), fed


def means():
    """Two clients that estimate a mean: x = 1, loss (w - y)^2/2. The first has 0 and 2 and, to exchange one for, 6."""
    train = [([[1.0], [1.0]], [0.0, 2.0]), ([[1.0]], [3.0])]
    test = [([[1.0]], [6.0]), ([[1.0]], [3.0])]
    return made(ft.Federation.from_arrays(train, test, task="regression"))


def test_means_by_hand():
    task, fed = means()
    # alone, the first mean goes from 1 to 4 with the 0 exchanged (to 3 with the 2): on 6 the loss goes from 12.5 to 2, on 0 from
    # 0.5 to 8
    local = federated_stability(envelope_solver(task, 0.0), task, fed, records=2)
    assert local.clients == (0, 1)
    assert local.gamma == pytest.approx([12.5 - 2, 0.0])  # the second's record is exchanged for its like
    # one model for all is the mean of 1 and 3; with the 0 exchanged, of 4 and 3: on 6 from 8 to 3.125, on 0 from 2 to 6.125
    pooled = federated_stability(envelope_solver(task, math.inf), task, fed, clients=[0], records=2)
    assert pooled.gamma == pytest.approx([8 - 3.125])


def test_only_the_one_record_is_replaced():
    _, fed = means()
    other = replace_record(fed, 0, 1, fed.test.x[0] * 2, fed.test.y[0])
    assert other.train.y.tolist() == [0, 6, 3]
    assert other.train.x[:, 0].tolist() == [1, 2, 1]
    assert fed.train.y.tolist() == [0, 2, 3]


def regression(**options):
    fed = ft.Federation.load("clusters", clients=6, groups=1, d=2, R=0.3, distance=0.0, noise=0.5, test_rows=30, **options)
    return made(fed)


@pytest.mark.parametrize("lam", [0.0, 0.03, 0.15])
def test_proposition_21_lies_above_the_measured_stability(lam):
    for seed in range(3):
        task, fed = regression(rows=150, seed=seed)
        known = constants(task, fed)
        longest = max(float(m["weight"].norm()) for m in solve(task, fed, lam).models)
        beta, loss = record_smoothness(task, fed), loss_bound(task, fed, 1.5 * longest)
        bound = fedprox_stability(0.9 * known.mu, beta, loss, lam, 150, 1 / 6)  # an exchanged record may lower mu a little
        measured = federated_stability(envelope_solver(task, lam), task, fed, clients=[0, 3], records=4)
        assert (measured.gamma > 0).all()
        assert measured.gamma.max() <= bound


def test_sharing_makes_a_clients_model_steadier():
    task, fed = regression(rows=40)
    gammas = [federated_stability(envelope_solver(task, lam), task, fed, records=4).gamma.mean() for lam in (0.0, 1.0, math.inf)]
    assert gammas[0] > gammas[1] > gammas[2]
    assert gammas[2] < gammas[0] / 3  # of the order of p_i = 1/6


def test_more_rows_make_it_steadier_in_proportion():
    gammas = []
    for rows in (50, 400):
        task, fed = regression(rows=rows)
        gammas.append(federated_stability(envelope_solver(task, 0.2), task, fed, records=6).gamma.mean())
    assert gammas[0] / gammas[1] == pytest.approx(8, rel=0.5)


def test_a_run_can_be_measured_and_agrees_with_the_exact_minimum():
    task, fed = regression(rows=40)
    options = {"rounds": 60, "bias": False, "dtype": "float64", "evaluate_every": 0, "engine": "vectorized"}

    def trained(federation):
        run = ft.run(ft.FedCLUP(lam=0.5, lr=0.3, steps=20), federation, **options)
        return [run.model(i) for i in range(len(federation))]

    measured = federated_stability(trained, task, fed, clients=[2], records=1)
    exact = federated_stability(envelope_solver(task, 0.5), task, fed, clients=[2], records=1)
    assert measured.gamma == pytest.approx(exact.gamma, rel=1e-4)


def test_the_same_seed_replaces_the_same_records():
    task, fed = regression(rows=40)
    first, again, other = (
        federated_stability(envelope_solver(task, 0.5), task, fed, clients=[1], records=1, seed=seed).gamma for seed in (0, 0, 1)
    )
    assert np.allclose(first, again, rtol=1e-9)
    assert not np.allclose(first, other, rtol=1e-3)


def test_the_theorems_numbers_by_hand():
    assert fedprox_stability(1.0, 2.0, 3.0, 0.0, 100, 0.1) == pytest.approx(9.6)
    assert fedprox_stability(1.0, 2.0, 3.0, 0.5, 100, 0.1) == pytest.approx(6.4)
    # beta + lam = 2.5, mu + lam = 1.5: 4 * 0.1 (5/3 + 3/2) and 0.2 (sqrt(5/3) + 0.8)
    outer, inner = 0.4 * (5 / 3 + 1.5), 0.2 * (math.sqrt(5 / 3) + 0.8)
    wanted = 6.4 + 2 * math.sqrt(12) * (outer + inner) + 32 * (outer**2 + inner**2)
    assert fedprox_stability(1.0, 2.0, 3.0, 0.5, 100, 0.1, 0.1, 0.2) == pytest.approx(wanted)
    assert fedavg_stability(1.0, 2.0, 3.0, 100, 0.1) == pytest.approx(0.006)
    assert local_stability(1.0, 2.0, 3.0, 100, c=2.0) == pytest.approx(0.12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fedprox_stability(1.0, 2.0, 3.0, 0.0, 7, 0.1), "at least 8, not 7"),
        (lambda: fedprox_stability(1.0, 2.0, 3.0, 1.0, 100, 0.1), "use a smaller lam"),
        (lambda: fedprox_stability(1.0, 2.0, 3.0, -1.0, 100, 0.1), "at least 0"),
        (lambda: fedprox_stability(0.0, 2.0, 3.0, 1.0, 100, 0.1), "mu must be finite"),
        (lambda: replace_record(means()[1], 0, 2, torch.zeros(1), torch.zeros(())), "has no row 2"),
        (lambda: federated_stability(envelope_solver(means()[0], 0.0), *means(), records=0), "records"),
    ],
)
def test_bad_numbers_are_refused_in_one_line(call, words):
    with pytest.raises(InvalidArgument, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)
