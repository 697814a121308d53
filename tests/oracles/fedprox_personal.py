"""FedProx in two stages: MINIMAX, Algorithm 2, for problem (20).

Stage I. Sampled clients run SoftLocalSGD from their own w_i towards g, then the server takes a step with the
factor lam * server_lr * m / |C| on the p_i as they are. (The listing has the branches of its sampling test
swapped; summing over C only makes sense if C trains.)
Stage II. The listing starts from the client's own w_i and pulls towards the last g; the prose near (20),
which speaks of starting at what Stage I learnt for all, is not followed. A client never sampled has no
w_i yet: its w_i is the g it would receive now. Stage II is for prediction only and is redone each round.
P_W is applied to local iterates alone; the server's g is not projected, as in the listing.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import linear_cases


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, server_lr, lam, radius=None):
    m = len(clients)
    g = np.array(start, dtype=float)
    own = [None] * m
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        pull = np.zeros_like(g)
        for i in cohort:  # Stage I
            begin = g if own[i] is None else own[i]
            own[i] = _soft_local_sgd(grad, clients[i], begin, g, batches(t, i, "train"), lr, lam, radius)
            pull = pull + weights[i] * (g - own[i])
        g = g - lam * server_lr * m / len(cohort) * pull

        deployed = []
        for i in range(m):  # Stage II
            begin = g if own[i] is None else own[i]
            steps = batches(t, i, "personalize")
            deployed.append(_soft_local_sgd(grad, clients[i], begin, g, steps, lr, lam, radius))
        history.append({"shared": g.copy(), "personal": deployed})
    return history


def _soft_local_sgd(grad, data, begin, g, steps, lr, lam, radius):
    X, y = data
    w = begin.copy()
    for idx in steps:
        w = w - lr * (grad(w, X[idx], y[idx]) + lam * (w - g))
        if radius is not None:
            norm = np.linalg.norm(w)
            if norm > radius:
                w = w * (radius / norm)
    return w


TOLD = {"lr": 0.15, "server_lr": 0.9, "lam": 0.6, "radius": 1.3}
CASES = linear_cases(ft.FedProxPersonal(**TOLD, final_steps=4), TOLD)
