"""FedPer: Arivazhagan et al. (2019). Also FedSim, and by another split LG-FedAvg and FedBN (affine parameters).

A sampled client joins the received u and its kept v_i, takes plain SGD steps of one size on the whole vector,
keeps the v coordinates and sends the u coordinates, of which the server takes the weighted mean. Published
LG-FedAvg and FedBN code takes the plain mean: uniform `weights`.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import SPLIT, Case


def run(grad, clients, start, *, rounds, batches, cohorts, weights, shared_at, personal_at, lr):
    models = [np.array(start, dtype=float) for _ in clients]
    shared = models[0][shared_at]
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean = np.zeros_like(shared)
        for i in cohort:
            X, y = clients[i]
            w = models[i].copy()
            w[shared_at] = shared
            for idx in batches(t, i, "train"):
                w = w - lr * grad(w, X[idx], y[idx])
            models[i][personal_at] = w[personal_at]
            mean = mean + weights[i] / mass * w[shared_at]
        shared = mean
        for w in models:
            w[shared_at] = shared
        history.append({"shared": shared.copy(), "personal": [w.copy() for w in models]})
    return history


CASES = (Case(ft.FedPer(lr=0.2, personal="bias", steps=3), {"lr": 0.2, **SPLIT}),)
