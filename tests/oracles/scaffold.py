"""Scaffold: Karimireddy et al. (2020), Algorithm 1 with Option II for the client's control variate.

Steps on g - c_i + c from the received w; c_i then becomes c_i - c plus the mean step (w - y) / (K lr), K being
the client's true number of steps. The server moves by `server_lr` along the plain mean displacement of the
cohort, and c by the cohort's mean change times the cohort's share of all clients. All variates start at zero.
`weights` are not used.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import PLAIN_MEAN, Case


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, server_lr):
    shared = np.array(start, dtype=float)
    c = np.zeros_like(shared)
    c_own = [np.zeros_like(shared) for _ in clients]
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        moves, changes = [], []
        for i in cohort:
            X, targets = clients[i]
            steps = batches(t, i, "train")
            y = shared.copy()
            for idx in steps:
                y = y - lr * (grad(y, X[idx], targets[idx]) - c_own[i] + c)
            c_plus = c_own[i] - c + (shared - y) / (len(steps) * lr)
            moves.append(y - shared)
            changes.append(c_plus - c_own[i])
            c_own[i] = c_plus
        shared = shared + server_lr * np.mean(moves, axis=0)
        c = c + len(cohort) / len(clients) * np.mean(changes, axis=0)
        history.append({"shared": shared.copy(), "personal": [shared.copy() for _ in clients]})
    return history


TOLD = {"lr": 0.2, "server_lr": 0.9}
CASES = (Case(ft.Scaffold(**TOLD, steps=3), TOLD, settings=PLAIN_MEAN),)
