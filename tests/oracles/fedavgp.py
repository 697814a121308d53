"""FedAvg-P: PARTIAL, Section 3.1. Each model is split into a shared part u and a personal part v_i.

The listing of Algorithm 3.1 is missing from our text; the local step is the one that opens Section 3.2.1, both
outer steps are lines 9 and 12 of Algorithm 4.1. A sampled client takes SGD steps on u_i (size `lr`) and on v_i
(`personal_lr`) with one gradient taken at the pair before either moves. It then goes the fraction
`personal_server_lr` of the way from its old v_i to the last one, the server the fraction `server_lr` from u to
the cohort's mean of the u_i. The paper's mean is plain; here it carries `weights`. FedSim: both fractions are 1.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import SPLIT, Case


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
            for idx in batches(t, i, "train"):
                g = grad(_join(u, v, shared_at, personal_at), X[idx], y[idx])
                u = u - lr * g[shared_at]
                v = v - personal_lr * g[personal_at]
            own[i] = (1.0 - personal_server_lr) * own[i] + personal_server_lr * v
            mean = mean + weights[i] / mass * u
        shared = (1.0 - server_lr) * shared + server_lr * mean
        personal = [_join(shared, v, shared_at, personal_at) for v in own]
        history.append({"shared": shared.copy(), "personal": personal})
    return history


def _join(u, v, shared_at, personal_at):
    w = np.empty(len(u) + len(v))
    w[shared_at] = u
    w[personal_at] = v
    return w


TOLD = {"lr": 0.2, "personal_lr": 0.3, "server_lr": 0.8, "personal_server_lr": 0.6}
CASES = (Case(ft.FedAvgP(**TOLD, personal=["bias"], steps=3), {**TOLD, **SPLIT}),)
