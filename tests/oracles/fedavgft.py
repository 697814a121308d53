"""FedAvg followed by local fine-tuning: MINIMAX, Section 3.3 and Appendix D.

The federation is plain FedAvg (Algorithm 1). For its predictions every client, sampled or not, takes a copy
of the newest shared model and runs plain SGD on it; that copy is dropped before the next round.
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
            w = _sgd(grad, clients[i], shared, batches(t, i, "train"), lr)
            move = move + weights[i] / mass * (w - shared)
        shared = shared + server_lr * move
        tuned = [_sgd(grad, data, shared, batches(t, i, "personalize"), lr) for i, data in enumerate(clients)]
        history.append({"shared": shared.copy(), "personal": tuned})
    return history


def _sgd(grad, data, begin, steps, lr):
    X, y = data
    w = begin.copy()
    for idx in steps:
        w = w - lr * grad(w, X[idx], y[idx])
    return w


TOLD = {"lr": 0.15, "server_lr": 0.8}
CASES = linear_cases(ft.FedAvgFT(**TOLD, finetune_steps=3), TOLD)
