"""Scaffold-P: PARTIAL, Algorithm 4.1. FedAvg-P whose u steps are corrected by control variates.

Before round 0 all clients, sampled or not, set c_i to the mean of their "roll" gradients in u at the start, and
c is the plain mean over all of them. Each u step then uses the gradient less c_i plus c, with the c of the
round's start for the whole cohort; v steps are uncorrected. Afterwards c_i is rebuilt from the mean u step,
with the inner step size `lr` and the client's own number of steps, and c moves by the sum of the cohort's
changes over the number of all clients. The server's mean is plain, so uneven `weights` are refused.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import PLAIN_MEAN, SPLIT, Case


def run(
    grad,
    clients,
    start,
    *,
    rounds,
    batches,
    cohorts,
    weights,
    shared_at,
    personal_at,
    lr,
    personal_lr,
    server_lr,
    personal_server_lr,
):
    assert np.allclose(weights, weights[0])
    start = np.array(start, dtype=float)
    shared = start[shared_at]
    own = [start[personal_at] for _ in clients]
    c_own = []
    for i, (X, y) in enumerate(clients):
        roll = [grad(start.copy(), X[idx], y[idx])[shared_at] for idx in batches(0, i, "roll")]
        c_own.append(sum(roll) / len(roll))
    c = sum(c_own) / len(clients)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        total, change = np.zeros_like(shared), np.zeros_like(shared)
        for i in cohort:
            X, y = clients[i]
            steps = batches(t, i, "train")
            u, v = shared.copy(), own[i].copy()
            for idx in steps:
                g = grad(_join(u, v, shared_at, personal_at), X[idx], y[idx])
                u = u - lr * (g[shared_at] - c_own[i] + c)
                v = v - personal_lr * g[personal_at]
            own[i] = (1.0 - personal_server_lr) * own[i] + personal_server_lr * v
            c_new = c_own[i] - c + (shared - u) / (len(steps) * lr)
            change = change + (c_new - c_own[i])
            c_own[i] = c_new
            total = total + u
        shared = (1.0 - server_lr) * shared + server_lr * total / len(cohort)
        c = c + change / len(clients)
        personal = [_join(shared, v, shared_at, personal_at) for v in own]
        history.append({"shared": shared.copy(), "personal": personal})
    return history


def _join(u, v, shared_at, personal_at):
    w = np.empty(len(u) + len(v))
    w[shared_at] = u
    w[personal_at] = v
    return w


TOLD = {"lr": 0.2, "personal_lr": 0.3, "server_lr": 0.8, "personal_server_lr": 0.6}
# our round 0 is the roll call: our round t + 1 is the paper's round t
CASES = (Case(ft.ScaffoldP(**TOLD, personal="bias", steps=3), {**TOLD, **SPLIT}, settings=PLAIN_MEAN, before=1),)
