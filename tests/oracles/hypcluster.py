"""HypCluster: Mansour et al. (2020), the stochastic version of their Algorithm 1 (from memory).

A sampled client receives all k models, picks the one with the lowest risk on its whole training set before it
trains (ties: the lowest index), trains that one alone and returns it. The server averages each cluster over
its own clients of this round; a cluster nobody chose stays as it was. Nothing is kept by clients, so the choice
is made afresh each round and again for predicting.

The paper leaves the first models open. `starts` (k, dim) are drawn ones. Without them the first round makes them, by the
first phase (BUILD) of Kaufman & Rousseeuw's k-medoids: all of its clients train `start`, and the k medoids are taken one at
a time, each the trained model that leaves the smallest weighted sum of squared distances to the nearest medoid so far. A
cluster starts as the weighted mean of the trained models that are nearest to its medoid.
"""

import numpy as np
import torch

import fedtailor as ft
from tests.oracles.harness import Case, Setting
from tests.oracles.risks import cross_entropy


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, k, risk, starts=None):
    models = np.array([start] * k if starts is None else starts, dtype=float)
    if models.ndim != 2 or len(models) != k:
        raise ValueError(f"starts has shape {models.shape}, expected ({k}, dim)")

    def pick(i):
        X, y = clients[i]
        return int(np.argmin([risk(w, X, y) for w in models]))

    def train(w, t, i):
        X, y = clients[i]
        for idx in batches(t, i, "train"):
            w = w - lr * grad(w, X[idx], y[idx])
        return w

    history = []
    for t in range(rounds):
        trained = [[] for _ in range(k)]
        if t == 0 and starts is None:
            arrived = [(weights[i], train(models[0], t, i)) for i in cohorts(t)]
            medoids = build(arrived, k)
            for p, w in arrived:
                trained[nearest(w, medoids)].append((p, w))
        else:
            for i in cohorts(t):
                c = pick(i)
                trained[c].append((weights[i], train(models[c], t, i)))
        for c in range(k):
            if trained[c]:
                mass = sum(p for p, _ in trained[c])
                models[c] = sum(p / mass * w for p, w in trained[c])
        personal = [models[pick(i)].copy() for i in range(len(clients))]
        history.append({"shared": models.ravel().copy(), "personal": personal})
    return history


def nearest(w, medoids):
    return min(range(len(medoids)), key=lambda c: sum((w - medoids[c]) ** 2))


def build(arrived, k):
    medoids = []
    for _ in range(k):

        def left(candidate, before=tuple(medoids)):
            return sum(p * min(sum((w - m) ** 2) for m in (*before, candidate)) for p, w in arrived)

        medoids.append(min((w for _, w in arrived), key=left))
    return medoids


def told(trial):
    """What the clients choose by, and the package's first models where they are drawn."""
    method = trial.plan.algorithm
    drawn = {}
    if method.spread:
        models, _ = method.init_server(trial.plan.task)
        drawn["starts"] = one_by_one(models)["weight"].numpy()
    return {"lr": method.lr, "k": method.k, "risk": cross_entropy, **drawn}


def one_by_one(shared):
    """The k models of the shared tree, one after the other, as a tree that flattens to them."""
    weight, bias = shared["models"]["weight"], shared["models"]["bias"]
    return {"weight": torch.cat([weight.flatten(1), bias], 1)}


CASES = tuple(
    Case(
        ft.HypCluster(lr=0.2, steps=3, k=k, spread=spread),
        told,
        f"k={k} {'drawn' if spread else 'parted'}",
        (Setting(None, 3, "size"), *((Setting(None, 4),) if not spread and k > 1 else ())),
        shared=one_by_one,
    )
    for k, spread in ((1, 0.0), (2, 0.0), (3, 0.0), (3, 0.5))
)
