"""Per-FedAvg: Fallah, Mokhtari and Ozdaglar (2020), Algorithm 1, objective mean_i f_i(w - inner_lr grad f_i(w)).

The meta-gradient is (I - inner_lr H(w)) g(w') at w' = w - inner_lr g(w). "first-order" drops the Hessian term;
"free" replaces H(w) u, u = g(w'), by the central difference (g(w + delta u) - g(w - delta u)) / (2 delta). The
paper draws three batches per step, here one serves for all. server_lr is an addition: 1 gives the paper's mean.
From memory. To predict, every client takes plain steps of inner_lr from the newest shared model.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import Case


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, inner_lr, hessian, delta, server_lr):
    if hessian not in ("first-order", "free"):
        raise ValueError(hessian)
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
                A, b = X[idx], y[idx]
                u = grad(w - inner_lr * grad(w, A, b), A, b)
                step = u
                if hessian == "free":
                    Hu = (grad(w + delta * u, A, b) - grad(w - delta * u, A, b)) / (2.0 * delta)
                    step = u - inner_lr * Hu
                w = w - lr * step
            move = move + weights[i] / mass * (w - shared)
        shared = shared + server_lr * move

        personal = []
        for i, (X, y) in enumerate(clients):
            w = shared.copy()
            for idx in batches(t, i, "personalize"):
                w = w - inner_lr * grad(w, X[idx], y[idx])
            personal.append(w)
        history.append({"shared": shared.copy(), "personal": personal})
    return history


FIRST_ORDER = {"lr": 0.2, "inner_lr": 0.1, "server_lr": 0.9}
FREE = {"lr": 0.2, "inner_lr": 0.1, "hessian": "free", "delta": 1e-2}
CASES = (
    Case(ft.PerFedAvg(**FIRST_ORDER, steps=3, finetune_steps=2), {**FIRST_ORDER, "hessian": "first-order", "delta": 1e-3}),
    Case(ft.PerFedAvg(**FREE, steps=3), {**FREE, "server_lr": 1.0}, "free"),
)
