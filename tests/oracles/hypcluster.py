"""HypCluster: Mansour et al. (2020), the stochastic version of their Algorithm 1 (from memory).

A sampled client receives all k models, picks the one with the lowest risk on its whole training set before it
trains (ties: the lowest index), trains that one alone and returns it. The server averages each cluster over
its own clients of this round; a cluster nobody chose stays as it was. Nothing is kept by clients, so the choice
is made afresh each round and again for predicting. `starts` (k, dim) takes the place of `start`, which is unused.
"""

import numpy as np
import torch

import fedtailor as ft
from tests.oracles.harness import Case, Setting
from tests.oracles.risks import cross_entropy


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


def told(trial):
    """The package's first models, which are drawn; the risk by which clients choose."""
    method = trial.plan.algorithm
    models, _ = method.init_server(trial.plan.task)
    return {"lr": method.lr, "k": method.k, "starts": one_by_one(models)["weight"].numpy(), "risk": cross_entropy}


def one_by_one(shared):
    """The k models of the shared tree, one after the other, as a tree that flattens to them."""
    weight, bias = shared["models"]["weight"], shared["models"]["bias"]
    return {"weight": torch.cat([weight.flatten(1), bias], 1)}


CASES = tuple(
    Case(ft.HypCluster(lr=0.2, steps=3, k=k, spread=0.5), told, f"k={k}", (Setting(None, 3, "size"),), shared=one_by_one)
    for k in (1, 3)
)
