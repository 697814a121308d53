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

With combine="pool" there is no choice between w and v: their logarithms are weighed, and those of the client's own shares s of
the classes among its n training rows, s_c = (n_c + 1/2) / (n + K/2). The client answers with softmax(z), where
    z_c = a log p_c + b log r_c + d log s_c,   a = theta_1 . row,   b = theta_2 . row,   d = theta_3 . row.
The 30 numbers theta = (theta_1, theta_2, theta_3) start at theta0, which is zero but for the one's weights in theta_1 and
theta_2: these are 1/2, which gives the geometric mean of both models.
A client of a round sends the gradient g and the Hessian H, at the theta it received, of the sum of -log softmax(z)_y over all its
validation rows. The server keeps the same means, and takes theta = (H + ridge I)^{-1} (H theta - g + ridge theta0).
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


def shares(y):
    return np.array([((y == c).sum() + 1 / 2) / (len(y) + K / 2) for c in range(K)])


def slopes(p, r, s):
    """[rows, K, 30], row by row and class by class: what theta's numbers are multiplied with, to be added up to the scores z."""
    return np.array(
        [
            [np.concatenate([np.log(a[c]) * e, np.log(b[c]) * e, np.log(s[c]) * e]) for c in range(K)]
            for a, b, e in zip(p, r, described(p, r), strict=True)
        ]
    )


def pooled(theta, p, r, s):
    """[rows, K]: softmax(z)."""
    z = slopes(p, r, s) @ theta
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def pool_statistics(w, v, theta, s, X, y):
    p, r = chances(w, X), chances(v, X)
    g, H = np.zeros(30), np.zeros((30, 30))
    for q, J, c in zip(pooled(theta, p, r, s), slopes(p, r, s), y, strict=True):
        g += J.T @ (q - np.eye(K)[c])
        H += J.T @ (np.diag(q) - np.outer(q, q)) @ J
    return g, H, len(y)


def before_any(combine):
    """theta0."""
    theta = np.zeros(30 if combine == "pool" else 10)
    if combine == "pool":
        theta[[9, 19]] = 1 / 2
    return theta


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, tune_lr, ridge, memory, warmup, combine, inference, val):
    w, theta, theta0, history = np.array(start, float), before_any(combine), before_any(combine), []
    size = len(theta0)
    H_sum, b_sum, mass = np.zeros((size, size)), np.zeros(size), 0.0

    def walked(model, i, t, phase, rate):
        X, y = clients[i]
        for idx in batches(t, i, phase):
            model = model - rate * grad(model, X[idx], y[idx])
        return model

    for t in range(rounds):
        cohort = cohorts(t)
        share = np.array([weights[i] for i in cohort]) / sum(weights[i] for i in cohort)
        learning, used = combine in ("gate", "pool") and t >= warmup, 0
        g, H = np.zeros(size), np.zeros((size, size))
        for s, i in zip(share, cohort, strict=True):
            if learning:
                v = walked(w, i, t, "local", tune_lr)
                if combine == "pool":
                    found = pool_statistics(w, v, theta, shares(clients[i][1]), *val[i])
                else:
                    found = statistics(w, v, theta, *val[i])
                g, H, used = g + s * found[0], H + s * found[1], used + found[2]
        w = w + sum(s * (walked(w, i, t, "train", lr) - w) for s, i in zip(share, cohort, strict=True))
        if learning:
            H_sum, b_sum, mass = memory * H_sum + H, memory * b_sum + H @ theta - g, memory * mass + 1
            theta = np.linalg.solve(H_sum / mass + ridge * np.eye(size), b_sum / mass + ridge * theta0)
        tuned = [walked(w, i, t, "personalize", tune_lr) for i in range(4)]
        personal = [answer(w, tuned[i], theta, shares(clients[i][1]), val[i], combine, inference) for i in range(4)]
        history.append({"shared": w, "personal": personal, "theta": theta, "used": used})
    return history


def answer(w, v, theta, s, rows, combine, inference):
    """The chances a client gives to the classes of the probe's rows."""
    p, r = chances(w, PROBE), chances(v, PROBE)
    if combine == "average":
        return (p + r) / 2
    if combine == "pool":
        return pooled(theta, p, r, s)
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


METHOD = ft.FlowGate(lr=0.2, epochs=2, finetune_epochs=3, finetune_lr=0.5, ridge=0.05, memory=0.8, combine="gate")
SETTINGS = (Setting(None, 4), Setting(4, 3, "size"), Setting(4, 2))
PROBLEM = replace(BIASED, val=validation, probe=PROBE)
CASES = (
    Case(METHOD, told, "", SETTINGS, PROBLEM),
    Case(replace(METHOD, memory=0.0), told, "the last round alone", SETTINGS[:1], PROBLEM),
    Case(replace(METHOD, warmup=3), told, "later", SETTINGS[1:2], PROBLEM),
    Case(replace(METHOD, inference="soft"), told, "soft", SETTINGS[1:2], PROBLEM),
    Case(replace(METHOD, combine="average"), told, "plain mean", SETTINGS[1:2], PROBLEM),
    Case(replace(METHOD, combine="stack"), told, "stacked by each client", SETTINGS[1:2], PROBLEM),
    Case(replace(METHOD, combine="pool"), told, "pooled", SETTINGS, PROBLEM),
    Case(
        replace(METHOD, combine="pool", memory=0.0, warmup=2), told, "pooled later, the last round alone", SETTINGS[1:2], PROBLEM
    ),
)


def agree(trial, seen, entry):
    close(flat(seen.shared["model"]), entry["shared"], trial, "shared", seen)
    if trial.case.method.combine in ("gate", "pool"):
        close(seen.shared["gate"], entry["theta"], trial, "gate", seen)
    for i, theirs in enumerate(entry["personal"]):
        close(np.exp(seen.logits[i]), theirs, trial, f"client {i}", seen)


def afterwards(trial, history):
    assert harness.gap(history[-1]["shared"], trial.start) > 0.05
    combine = trial.case.method.combine
    if combine in ("gate", "pool"):
        assert sum(entry["used"] for entry in history) > 10
        assert np.abs(history[-1]["theta"] - before_any(combine)).max() > 0.1
