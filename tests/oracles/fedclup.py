"""FedCLUP: CLUP, Algorithms 1 (all rows) and 2 (mini-batches), for problem (2).

Client: warm start at its own w_i, steps (13) on h_i(w, g) = L_i(w) + lam/2 |g - w|^2; uploads lam (g - w_i),
which is Lemma 2's gradient of the Moreau envelope with w_i in place of the exact proximal point.
Server: step (12) on the mean upload. The paper has every client in every round; under sampling the mean is
the cohort's.
"""

import math

import numpy as np


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
