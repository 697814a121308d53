"""FedAvg: McMahan et al. (2017), Algorithm 1; MINIMAX, Algorithm 1, with its global step size.

The server moves by `server_lr` along the cohort's mean displacement. MINIMAX prints the unbiased factor
m p_i / |C| instead of p_i / sum_C p; the two agree when everyone takes part or when p is uniform.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import linear_cases


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, server_lr):
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
                w = w - lr * grad(w, X[idx], y[idx])
            move = move + weights[i] / mass * (w - shared)
        shared = shared + server_lr * move
        history.append({"shared": shared.copy(), "personal": [shared.copy() for _ in clients]})
    return history


TOLD = {"lr": 0.15, "server_lr": 0.8}
CASES = linear_cases(ft.FedAvg(**TOLD), TOLD)
