"""FedPAC: Xu, Tong and Huang (2023), Algorithm 1: features aligned to common centroids, heads combined for each client.

Round of a client i, which receives the body theta, the centroids C and a head phi_i made for it (in the first round its start):
  1. statistics of its training rows under the received theta, z being the features in evaluation mode: with p_c its share of
     class c and mu_c the class's mean feature,
         h_i[c] = p_c mu_c,    V_i = (sum_c p_c mean_c |z|^2 - sum_c p_c^2 |mu_c|^2) / n_i;
  2. phase "personal": steps on the head with the body fixed, on cross-entropy (rate ``personal_lr``);
  3. phase "train": steps on the body with the head fixed, on cross-entropy plus lam mean_{rows, features} (z - C[y])^2; a
     class with no centroid yet has no such term;
  4. its centroids, the class means of the features of its rows under the new body, with their counts n_ic.
Server: theta is the weighted mean of the bodies; C[c] the mean of the round's centroids weighed by n_ic (nobody: as it was);
the head of each client i of the round becomes sum_j a_ij phi_j over the round's clients j, a_i minimising over the simplex
    a' P_i a,    P_i[j, k] = (V_j if j = k) + sum_c (h_i[c] - h_j[c]) . (h_i[c] - h_k[c]).
A client predicts with the newest body and the head last made for it; who was never sampled has the first head.

From memory of the released code: the order of 1-4, that V and h are taken before training and the centroids after it, the
squared error as a mean. It also sets entries of a_i below 1e-3 to zero; not here. ``simplex`` is exact, by trying all supports.
Models are dicts of arrays as in networks.py without norms; "shared" is {"body", "centroids", "known"}.
"""

from dataclasses import replace
from itertools import combinations

import numpy as np

import fedtailor as ft
from tests.oracles import networks
from tests.oracles.fedproto import feature_gradient, features, kept_while_nobody_has_it
from tests.oracles.harness import NETWORKS, SOMETIMES_LACKING, STEPS_AND_EPOCHS, Case, close, gap, lacking


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, personal_lr, lam):
    names = networks._names(networks.paths(start)[-1])
    classes, D = start[names[0]].shape
    body = {name: np.array(value, dtype=float) for name, value in start.items() if name not in names}
    heads = [{name: np.array(start[name], dtype=float) for name in names} for _ in clients]
    C, known = np.zeros((classes, D)), np.zeros(classes, dtype=bool)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean = {name: np.zeros_like(value) for name, value in body.items()}
        total, count = np.zeros((classes, D)), np.zeros(classes)
        sent, V, h = {}, {}, {}
        for i in cohort:
            X, y = clients[i]
            w = {name: (heads[i] if name in names else body)[name] for name in start}
            V[i], h[i] = statistics(features(w, X), y, classes)
            for idx in batches(t, i, "personal"):
                slope, _ = grad(w, X[idx], y[idx])
                w = {name: value - personal_lr * slope[name] if name in names else value for name, value in w.items()}
            for idx in batches(t, i, "train"):
                slope, _ = grad(w, X[idx], y[idx])
                pull = feature_gradient(w, X[idx], y[idx], C, known)
                w = {name: value if name in names else value - lr * (slope[name] + lam * pull[name]) for name, value in w.items()}
            sent[i] = {name: w[name] for name in names}
            mean = {name: value + weights[i] / mass * w[name] for name, value in mean.items()}
            z = features(w, X)
            for c in np.unique(y):
                total[c] += z[y == c].sum(axis=0)
                count[c] += (y == c).sum()
        body = mean
        here = count > 0
        C = np.where(here[:, None], total / np.where(here, count, 1.0)[:, None], C)
        known = known | here
        mixed = {i: simplex(quadratic(i, cohort, V, h)) for i in cohort}
        for i, a in mixed.items():
            heads[i] = {name: sum(share * sent[j][name] for share, j in zip(a, cohort, strict=True)) for name in names}
        personal = [{name: (head if name in names else body)[name] for name in start} for head in heads]
        shared = {"body": body, "centroids": C.copy(), "known": known.copy()}
        history.append({"shared": shared, "personal": personal, "mixed": mixed})
    return history


def statistics(z, y, classes):
    """(V, h [classes, D])."""
    n, D = z.shape
    h, v = np.zeros((classes, D)), 0.0
    for c in np.unique(y):
        p, rows = (y == c).mean(), z[y == c]
        mu = rows.mean(axis=0)
        h[c] = p * mu
        v += p * (rows**2).sum(axis=1).mean() - p**2 * mu @ mu
    return v / n, h


def quadratic(i, cohort, V, h):
    away = [(h[i] - h[j]).ravel() for j in cohort]
    return np.diag([V[j] for j in cohort]) + np.array([[a @ b for b in away] for a in away])


def simplex(P):
    """The minimiser of a' P a over a >= 0, sum a = 1, P positive definite: the best of all supports' stationary points."""
    n, best, least = len(P), None, np.inf
    for size in range(1, n + 1):
        for support in map(list, combinations(range(n), size)):
            a = np.zeros(n)
            a[support] = np.linalg.solve(P[np.ix_(support, support)], np.ones(size))
            a = a / a.sum()
            if (a >= 0).all() and a @ P @ a < least:
                best, least = a, a @ P @ a
    return best


TOLD = {"lr": 0.3, "personal_lr": 0.2, "lam": 2.0}
METHOD = ft.FedPAC(**TOLD, personal_epochs=2)
CASES = (
    Case(METHOD, TOLD, settings=STEPS_AND_EPOCHS, problem=NETWORKS["mlp"], rounds=6),
    Case(METHOD, TOLD, "classes missing", SOMETIMES_LACKING, replace(NETWORKS["mlp"], clients=lacking), 6),
)


def agree(trial, seen, entry):
    """The body, the class means, which classes have one; every client's head is in what it predicts, and at the server."""
    for ours, theirs in (("model", "body"), ("prototypes", "centroids"), ("known", "known")):
        close(seen.shared[ours], entry["shared"][theirs], trial, theirs, seen)
    for i, theirs in enumerate(entry["personal"]):
        close(seen.logits[i], networks.predict(theirs, trial.case.problem.probe), trial, f"client {i}", seen)
        head = {name: leaf[trial.plan.ranks[i]] for name, leaf in seen.server["heads"].items()}
        close(head, {name: theirs[name] for name in head}, trial, f"the head of client {i}", seen)


def afterwards(trial, history):
    last, start = history[-1], trial.start
    assert gap(last["personal"][0], start) > trial.case.learned
    shares = np.concatenate([np.ravel(list(entry["mixed"].values())) for entry in history])
    assert ((shares > 0.05) & (shares < 0.95)).mean() > 0.3  # heads of others are in most heads
    plain = replace(trial, case=replace(trial.case, told={**TOLD, "lam": 0.0})).follow()
    assert gap(plain[-1]["personal"], last["personal"]) > 1e-2  # the alignment has done something
    if trial.case.label == "classes missing" and trial.setting.cohort == 2:
        kept_while_nobody_has_it(trial, [entry["shared"]["centroids"] for entry in history])
