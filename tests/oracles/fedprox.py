"""FedProx, single model: Li et al. (2020), Algorithm 2, local objective h_i(w; g) = L_i(w) + mu/2 |w - g|^2.

The inexact local solver is a given number of SGD steps starting at g, and g stays put during a round.
Aggregation is FedAvg's, so mu = 0 gives FedAvg back.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import linear_cases


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, server_lr, mu):
    shared = np.array(start, dtype=float)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        move = np.zeros_like(shared)
        for i in cohort:
            X, y = clients[i]
            w = shared.copy()
            for idx in batches(t, i, "train"):
                w = w - lr * (grad(w, X[idx], y[idx]) + mu * (w - shared))
            move = move + weights[i] / mass * (w - shared)
        shared = shared + server_lr * move
        history.append({"shared": shared.copy(), "personal": [shared.copy() for _ in clients]})
    return history


TOLD = {"lr": 0.15, "server_lr": 0.8, "mu": 0.7}
CASES = linear_cases(ft.FedProx(**TOLD), TOLD)
