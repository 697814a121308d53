"""FlowGate, from its description: FedAvg's w, a fine-tuned copy v, and one logistic gate between the two for all clients.

A row is described by nine numbers in [0, 1], from the probabilities p of w and r of v over K classes, and a one:
    max p, max r, the distances of the two largest of p and of r, the entropies of p and r over log K, whether the largest
    stand at the same class, p at r's class, r at p's class.
The gate says with which chance w is right, of the rows on which exactly one is: q = 1 / (1 + exp(-theta . row)).
A client of a round takes w as received and v, fine-tuned from it, and its validation rows on which exactly one is right (t = 1:
it is w); it sends g = sum (q - t) row and H = sum q (1 - q) row row' at the theta it received, beside the change of w.
The server keeps the means over rounds, of weights memory^age, of H and of H theta - g, themselves means over clients with the
weights of the models, and takes theta = (H + ridge I)^{-1} (H theta - g): Newton's step on the clients' losses plus
ridge/2 |theta|^2, where there is one round to remember.
To predict, a row takes w where q > 1/2, v where q < 1/2, and the mean of both where the gate knows nothing.
"""

from dataclasses import replace

import numpy as np

import fedtailor as ft
from tests.oracles import harness
from tests.oracles.fedfomo import validation
from tests.oracles.harness import BIASED, BIASES, WEIGHTS, Case, D, K, Setting, close, flat

PROBE = np.random.default_rng(5).normal(size=(40, D)) * 2


def chances(w, X):
    z = X @ w[WEIGHTS].reshape(K, D).T + w[BIASES]
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def described(p, r):
    """[rows, 10], row by row."""
    out = []
    for a, b in zip(p, r, strict=True):
        first, second = np.argmax(a), np.argmax(b)
        gaps = [np.sort(c)[-1] - np.sort(c)[-2] for c in (a, b)]
        entropies = [-(c * np.log(c)).sum() / np.log(K) for c in (a, b)]
        out.append([a[first], b[second], *gaps, *entropies, float(first == second), a[second], b[first], 1.0])
    return np.array(out)


def statistics(w, v, theta, X, y):
    p, r = chances(w, X), chances(v, X)
    w_right, v_right = p.argmax(1) == y, r.argmax(1) == y
    one = w_right != v_right
    F, t = described(p, r)[one], w_right[one].astype(float)
    q = 1 / (1 + np.exp(-F @ theta))
    return F.T @ (q - t), F.T @ (F * (q * (1 - q))[:, None]), int(one.sum())


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, tune_lr, ridge, memory, warmup, combine, inference, val):
    w, theta, history = np.array(start, float), np.zeros(10), []
    H_sum, b_sum, mass = np.zeros((10, 10)), np.zeros(10), 0.0

    def walked(model, i, t, phase, rate):
        X, y = clients[i]
        for idx in batches(t, i, phase):
            model = model - rate * grad(model, X[idx], y[idx])
        return model

    for t in range(rounds):
        cohort = cohorts(t)
        share = np.array([weights[i] for i in cohort]) / sum(weights[i] for i in cohort)
        learning, used = combine == "gate" and t >= warmup, 0
        g, H = np.zeros(10), np.zeros((10, 10))
        for s, i in zip(share, cohort, strict=True):
            if learning:
                found = statistics(w, walked(w, i, t, "local", tune_lr), theta, *val[i])
                g, H, used = g + s * found[0], H + s * found[1], used + found[2]
        w = w + sum(s * (walked(w, i, t, "train", lr) - w) for s, i in zip(share, cohort, strict=True))
        if learning:
            H_sum, b_sum, mass = memory * H_sum + H, memory * b_sum + H @ theta - g, memory * mass + 1
            theta = np.linalg.solve(H_sum / mass + ridge * np.eye(10), b_sum / mass)
        personal = [answer(w, walked(w, i, t, "personalize", tune_lr), theta, val[i], combine, inference) for i in range(4)]
        history.append({"shared": w, "personal": personal, "theta": theta, "used": used})
    return history


def answer(w, v, theta, rows, combine, inference):
    """The chances a client gives to the classes of the probe's rows."""
    p, r = chances(w, PROBE), chances(v, PROBE)
    if combine == "average":
        return (p + r) / 2
    if combine == "stack":  # of eleven weights, the first with the least loss on validation rows
        X, y = rows
        pv, rv = chances(w, X)[np.arange(len(y)), y], chances(v, X)[np.arange(len(y)), y]
        losses = [-np.log(a * pv + (1 - a) * rv).mean() for a in np.arange(11) / 10]
        a = np.argmin(losses) / 10
        return a * p + (1 - a) * r
    q = 1 / (1 + np.exp(-described(p, r) @ theta))[:, None]
    if inference == "soft":
        return q * p + (1 - q) * r
    return np.where(q > 0.5, p, np.where(q < 0.5, r, (p + r) / 2))


def told(trial):
    method = trial.plan.algorithm
    names = ("lr", "ridge", "memory", "warmup", "combine", "inference")
    return {**{name: getattr(method, name) for name in names}, "tune_lr": method.finetune_lr, "val": validation()}


METHOD = ft.FlowGate(lr=0.2, epochs=2, finetune_epochs=3, finetune_lr=0.5, ridge=0.05, memory=0.8)
SETTINGS = (Setting(None, 4), Setting(4, 3, "size"), Setting(4, 2))
PROBLEM = replace(BIASED, val=validation, probe=PROBE)
CASES = (
    Case(METHOD, told, "", SETTINGS, PROBLEM),
    Case(replace(METHOD, memory=0.0), told, "the last round alone", SETTINGS[:1], PROBLEM),
    Case(replace(METHOD, warmup=3), told, "later", SETTINGS[1:2], PROBLEM),
    Case(replace(METHOD, inference="soft"), told, "soft", SETTINGS[1:2], PROBLEM),
    Case(replace(METHOD, combine="average"), told, "plain mean", SETTINGS[1:2], PROBLEM),
    Case(replace(METHOD, combine="stack"), told, "stacked by each client", SETTINGS[1:2], PROBLEM),
)


def agree(trial, seen, entry):
    close(flat(seen.shared["model"]), entry["shared"], trial, "shared", seen)
    if trial.case.method.combine == "gate":
        close(seen.shared["gate"], entry["theta"], trial, "gate", seen)
    for i, theirs in enumerate(entry["personal"]):
        close(np.exp(seen.logits[i]), theirs, trial, f"client {i}", seen)


def afterwards(trial, history):
    assert harness.gap(history[-1]["shared"], trial.start) > 0.05
    if trial.case.method.combine == "gate":
        assert sum(entry["used"] for entry in history) > 10
        assert np.abs(history[-1]["theta"]).max() > 0.1
