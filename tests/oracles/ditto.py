"""Ditto: Li et al. (2021), Algorithm 1, personal objective L_i(v) + lam/2 |v - w|^2.

Two branches that do not touch each other within a round: local SGD from the received w, whose displacement
is uploaded, and proximal steps of the kept v_i towards that same received w (not towards the moving copy).
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import linear_cases


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, server_lr, lam, personal_lr):
    shared = np.array(start, dtype=float)
    own = [None] * len(clients)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        move = np.zeros_like(shared)
        for i in cohort:
            X, y = clients[i]
            w = shared.copy()
            for idx in batches(t, i, "train"):
                w = w - lr * grad(w, X[idx], y[idx])
            move = move + weights[i] / mass * (w - shared)

            v = shared.copy() if own[i] is None else own[i]
            for idx in batches(t, i, "personal"):
                v = v - personal_lr * (grad(v, X[idx], y[idx]) + lam * (v - shared))
            own[i] = v
        shared = shared + server_lr * move
        history.append({"shared": shared.copy(), "personal": [(shared if v is None else v).copy() for v in own]})
    return history


TOLD = {"lr": 0.15, "server_lr": 0.8, "lam": 0.4, "personal_lr": 0.2}
CASES = linear_cases(ft.Ditto(**TOLD, personal_steps=5), TOLD)
