"""The quadratic program on the simplex: against a general solver, and where its answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from fedtailor.server.mixture import best_mixture


@pytest.mark.parametrize("seed", range(12))
def test_it_is_as_good_as_a_general_solver(seed):
    draw = np.random.default_rng(seed)
    n = int(draw.integers(2, 9))
    apart = draw.normal(size=(n, int(draw.integers(1, 6)))) + draw.normal(size=(n, 1))
    cost = np.diag(draw.uniform(0.01, 1, n)) + apart @ apart.T
    a = best_mixture(cost)
    even = np.full(n, 1 / n)
    theirs = minimize(
        lambda u: u @ cost @ u,
        even,
        jac=lambda u: 2 * cost @ u,
        bounds=[(0, 1)] * n,
        constraints={"type": "eq", "fun": lambda u: u.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    assert (a >= 0).all()
    assert a.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(a, theirs.x, atol=1e-6)
    slope = cost @ a  # equal where there is weight, no smaller elsewhere
    assert slope.min() >= a @ slope - 1e-9
    np.testing.assert_allclose(slope[a > 0], a @ slope, rtol=1e-8)


def test_without_distances_weights_are_inverse_variances():
    v = np.array([1.0, 2.0, 4.0])
    np.testing.assert_allclose(best_mixture(np.diag(v)), (1 / v) / (1 / v).sum(), atol=1e-9)


def test_a_client_without_variance_stays_with_itself_and_twins_share():
    np.testing.assert_allclose(best_mixture(np.diag([0.0, 1.0, 2.0])), [1, 0, 0], atol=1e-9)
    np.testing.assert_allclose(best_mixture(np.zeros((2, 2))), [0.5, 0.5])
    assert best_mixture(np.array([[3.0]])).tolist() == [1.0]
