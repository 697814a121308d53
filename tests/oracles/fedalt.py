"""FedAlt: Pillutla et al. (2022), the alternating method; FedRep: Collins et al. (2021), Algorithm 1.

A sampled client first steps on its kept v_i (phase "personal", size `personal_lr`) with the received u fixed,
then on u (phase "train", size `lr`) with the v_i just found fixed. The server takes the weighted mean of the
u_i. FedRep is the same round with many head steps (v) before few body steps (u).
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import SPLIT, Case


def run(grad, clients, start, *, rounds, batches, cohorts, weights, shared_at, personal_at, lr, personal_lr):
    start = np.array(start, dtype=float)
    shared = start[shared_at]
    own = [start[personal_at] for _ in clients]
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean = np.zeros_like(shared)
        for i in cohort:
            X, y = clients[i]
            u, v = shared.copy(), own[i].copy()
            for idx in batches(t, i, "personal"):
                v = v - personal_lr * grad(_join(u, v, shared_at, personal_at), X[idx], y[idx])[personal_at]
            for idx in batches(t, i, "train"):
                u = u - lr * grad(_join(u, v, shared_at, personal_at), X[idx], y[idx])[shared_at]
            own[i] = v
            mean = mean + weights[i] / mass * u
        shared = mean
        personal = [_join(shared, v, shared_at, personal_at) for v in own]
        history.append({"shared": shared.copy(), "personal": personal})
    return history


def _join(u, v, shared_at, personal_at):
    w = np.empty(len(u) + len(v))
    w[shared_at] = u
    w[personal_at] = v
    return w


TOLD = {"lr": 0.2, "personal_lr": 0.3}
CASES = (Case(ft.FedAlt(**TOLD, personal="bias", steps=3, personal_steps=4), {**TOLD, **SPLIT}),)
