"""FedCLUP: CLUP, Algorithms 1 (all rows) and 2 (mini-batches), for problem (2).

Client: warm start at its own w_i, steps (13) on h_i(w, g) = L_i(w) + lam/2 |g - w|^2; uploads lam (g - w_i),
which is Lemma 2's gradient of the Moreau envelope with w_i in place of the exact proximal point.
Server: step (12) on the mean upload. The paper has every client in every round; under sampling the mean is
the cohort's.
"""

import math

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.theory.rates import fedclup_steps
from tests.oracles.harness import REGRESSION, Case, Setting, learned, linear_cases


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, server_lr, lam):
    g = np.array(start, dtype=float)
    own = [None] * len(clients)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean_upload = np.zeros_like(g)
        for i in cohort:
            X, y = clients[i]
            w = g.copy() if own[i] is None else own[i]
            for idx in batches(t, i, "train"):
                w = w - lr * (grad(w, X[idx], y[idx]) + lam * (w - g))
            own[i] = w
            mean_upload = mean_upload + weights[i] / mass * lam * (g - w)
        g = g - server_lr * mean_upload
        history.append({"shared": g.copy(), "personal": [(g if w is None else w).copy() for w in own]})
    return history


def theory(lam, mu, L):
    """Corollary 2: eta = 1/L_l, gamma = 1/(2 L_g), and the least integer K that satisfies (134)."""
    eta = 1.0 / (lam + L)
    gamma = (lam + L) / (2.0 * lam * L)
    K = math.ceil(2.0 + (lam + L) / (lam + mu) * math.log(1056.0 * (L / mu) ** 2))
    return eta, gamma, K


TOLD = {"lr": 0.15, "server_lr": 1.1, "lam": 0.6}
SAME_BATCH = {"lr": 0.1, "server_lr": 1.0, "lam": 0.6}
CASES = (
    *linear_cases(ft.FedCLUP(**TOLD), TOLD),
    Case(
        ft.FedCLUP(**SAME_BATCH, steps=5, same_batch=True),
        SAME_BATCH,
        "same batch",
        (Setting(4, 4),),
        REGRESSION,
        3,
        one_model=True,
    ),
)


def afterwards(trial, history):
    learned(trial, history)
    if trial.case.label == "same batch":  # Algorithm 2: drawn once per round, without replacement
        rows = trial.batches(0, 1, "train")
        assert len(rows) == 5
        assert all((r == rows[0]).all() for r in rows)
        assert len(set(rows[0].tolist())) == 4


@pytest.mark.parametrize(("lam", "mu", "smoothness"), [(0.5, 1, 10), (1, 1, 1), (0.02, 0.3, 1.7), (50, 0.3, 1.7)])
def test_the_theorys_steps_are_those_of_corollary_2(lam, mu, smoothness):
    assert tuple(fedclup_steps(lam, mu, smoothness)) == pytest.approx(theory(lam, mu, smoothness), rel=1e-12)
