"""HypCluster: Mansour et al. (2020), the stochastic version of their Algorithm 1 (from memory).

A sampled client receives all k models, picks the one with the lowest risk on its whole training set before it
trains (ties: the lowest index), trains that one alone and returns it. The server averages each cluster over
its own clients of this round; a cluster nobody chose stays as it was. Nothing is kept by clients, so the choice
is made afresh each round and again for predicting. `starts` (k, dim) takes the place of `start`, which is unused.
"""

import numpy as np


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, k, starts, risk):
    models = np.array(starts, dtype=float)
    if models.ndim != 2 or len(models) != k:
        raise ValueError(f"starts has shape {models.shape}, expected ({k}, dim)")

    def pick(i):
        X, y = clients[i]
        return int(np.argmin([risk(w, X, y) for w in models]))

    history = []
    for t in range(rounds):
        trained = [[] for _ in range(k)]
        for i in cohorts(t):
            X, y = clients[i]
            c = pick(i)
            w = models[c].copy()
            for idx in batches(t, i, "train"):
                w = w - lr * grad(w, X[idx], y[idx])
            trained[c].append((weights[i], w))
        for c in range(k):
            if trained[c]:
                mass = sum(p for p, _ in trained[c])
                models[c] = sum(p / mass * w for p, w in trained[c])
        personal = [models[pick(i)].copy() for i in range(len(clients))]
        history.append({"shared": models.ravel().copy(), "personal": personal})
    return history
