"""AL2SGD+: Hanzely, Hanzely, Horvath and Richtarik (2020), L-Katyusha on L2GD's problem (from memory, through
the fact sheet).

F(x) = (1/n) sum_i f_i(x_i) + lam/(2n) sum_i |x_i - xbar|^2 is sampled through its two summands around an anchor
w whose whole gradient is known; one iteration per round, everybody takes part (`cohorts`, `weights` ignored).
When `refresh` says so the anchor becomes the y of BEFORE the step, as in Kovalev et al.'s L-Katyusha and as the
fact sheet's letters read (it writes y+ for the new one); anchor="new" takes the y of after it. rho is the
probability behind `refresh` and enters the step sizes alone.
"""

import math

import numpy as np
import pytest

import fedtailor as ft
from tests.oracles.harness import Case, Setting


def estimator(grad_full, x, w, coin, p, lam, grad_sample=None):
    """g for one coin. x, w: (n, dim). grad_full(x): the (n, dim) rows grad f_i(x_i); grad_sample: the same on batches."""
    n = len(x)
    sample = grad_full if grad_sample is None else grad_sample
    spread_w = w - w.mean(axis=0)
    anchor = grad_full(w) / n + lam / n * spread_w
    if coin:
        return anchor + lam / (n * p) * ((x - x.mean(axis=0)) - spread_w)
    return anchor + (sample(x) - sample(w)) / (n * (1.0 - p))


def run(grad, clients, start, *, rounds, batches, cohorts, weights, eta, theta1, theta2, gamma, beta, p, rho, lam,
        coins, refresh, anchor="old"):  # fmt: skip
    y = np.stack([np.array(start, dtype=float)] * len(clients))
    z, w = y.copy(), y.copy()
    history = []
    for k in range(rounds):
        x = theta1 * z + theta2 * w + (1.0 - theta1 - theta2) * y
        coin = coins(k)
        batch = None if coin else [batches(k, i, "train")[0] for i in range(len(clients))]
        g = estimator(_rows(grad, clients), x, w, coin, p, lam, _rows(grad, clients, batch))
        y_new = x - eta * g
        z = beta * z + (1.0 - beta) * x + gamma / eta * (y_new - x)
        if refresh(k):
            w = y.copy() if anchor == "old" else y_new.copy()
        y = y_new
        history.append({"shared": y.mean(axis=0), "personal": [v.copy() for v in y]})
    return history


def _rows(grad, clients, batch=None):
    def rows(points):
        pick = [slice(None)] * len(clients) if batch is None else batch
        return np.stack([grad(points[i], X[pick[i]], t[pick[i]]) for i, (X, t) in enumerate(clients)])

    return rows


def theory(n, mu, L, lam, p, rho):
    """Step sizes for f_i mu-strongly convex and L-smooth; F then has mu/n, L_F = (L + lam)/n and, for whole local
    gradients, expected smoothness calL = max(L/(1-p), lam/p)/n (from memory; the fact sheet leaves both open)."""
    mu_F, L_F, calL = mu / n, (L + lam) / n, max(L / (1.0 - p), lam / p) / n
    eta = 1.0 / (4.0 * max(L_F, calL))
    theta2 = calL / (2.0 * max(L_F, calL))
    theta1 = min(0.5, math.sqrt(eta * mu_F * max(0.5, theta2 / rho)))
    gamma = 1.0 / max(2.0 * mu_F, 4.0 * theta1 / eta)
    return {"eta": eta, "theta1": theta1, "theta2": theta2, "gamma": gamma, "beta": 1.0 - gamma * mu_F}


PROBLEM = {"lam": 0.6, "p": 0.4, "rho": 0.5}
METHOD = ft.AL2SGD(**PROBLEM, mu=0.1, smoothness=3.0)
STEPS = theory(4, 0.1, 3.0, **PROBLEM)


def told(trial):
    """The theory's steps, and the package's coins."""
    draws = {
        name: [trial.round(t).uniform(purpose, t) < share for t in range(trial.case.rounds)]
        for name, purpose, share in (("coins", "AL2SGD coin", 0.4), ("refresh", "AL2SGD refresh", 0.5))
    }
    assert all(len(set(drawn)) == 2 for drawn in draws.values())
    return {**PROBLEM, **STEPS, **{name: drawn.__getitem__ for name, drawn in draws.items()}}


CASES = (Case(METHOD, told, settings=(Setting(None, 4),), rounds=12, learned=1e-3, shared=lambda shared: shared["y"]),)


def test_the_steps_are_those_of_the_theory():
    names = ("eta", "theta1", "theta2", "gamma", "beta")
    assert METHOD.constants(4) == pytest.approx((*(STEPS[name] for name in names), 0.4, 0.5))


def test_the_estimator_has_the_gradient_as_its_mean():
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(2, 4, 3))
    hessians = [np.diag(draw.uniform(1, 2, 3)) for _ in range(4)]

    def rows(points):
        return np.stack([h @ v for h, v in zip(hessians, points, strict=True)])

    p, lam = 0.3, 0.7
    mean = p * estimator(rows, x, w, True, p, lam) + (1 - p) * estimator(rows, x, w, False, p, lam)
    assert np.allclose(mean, (rows(x) + lam * (x - x.mean(0))) / 4, atol=1e-14)
