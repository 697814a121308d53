"""FedROD: Chen and Chao (2022), "On bridging generic and personalized federated learning", linear personal head.

A model is a body and a generic head W, b; a client keeps a second head V, c, which adds to the generic one's logits:
    generic g(z) = W z + b,    personal g(z) + V z + c,    z the body's features.
One step on one batch, all of it from the weights of before the step:
  1. body and generic head descend on the mean balanced softmax loss -log(N_y exp g_y / sum_c N_c exp g_c), N_c being the
     number of the client's training rows of class c (exponent 1). That is cross-entropy on logits g + log N.
  2. V and c descend on the mean cross-entropy of the personal logits, through which neither the body nor the generic head
     is moved: both are constants there.
Body and generic head are sent and averaged; V and c stay. They begin at ``first`` (zero if None). A client predicts with the
personal logits on the newest body and generic head; who was never sampled has the first V and c.

From memory: that both steps see one forward pass (the released code does; the paper's Algorithm lists two losses and no order)
and that the personal head has the generic one's rate where ``personal_lr`` is not said.

A model is a dict of arrays as in networks.py, whose last layer is the generic head; a client's entry in "personal" is (model,
V, c).
"""

from dataclasses import replace

import numpy as np

import fedtailor as ft
from tests.oracles import harness, networks
from tests.oracles.harness import NETWORKS, STEPS_AND_EPOCHS, Case, close, gap, lacking


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, personal_lr=None, first=None):
    personal_lr = lr if personal_lr is None else personal_lr
    shared = {name: np.array(value, dtype=float) for name, value in start.items()}
    weight, bias = (f"{networks.paths(start)[-1]}.{leaf}".lstrip(".") for leaf in ("weight", "bias"))
    if first is None:
        first = np.zeros_like(shared[weight]), np.zeros_like(shared[bias])
    heads = [None] * len(clients)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean = {name: np.zeros_like(value) for name, value in shared.items()}
        for i in cohort:
            X, y = clients[i]
            with np.errstate(divide="ignore"):  # a class without rows has no part in the sum: its exponential is zero
                prior = np.log(np.bincount(y, minlength=len(shared[bias])))
            w, (V, c) = shared, first if heads[i] is None else heads[i]
            for idx in batches(t, i, "train"):
                z, logits = features(w, X[idx])
                off = softmax(logits + z @ V.T + c)
                off[np.arange(len(idx)), y[idx]] -= 1.0
                slope, statistics = grad({**w, bias: w[bias] + prior}, X[idx], y[idx])
                w = {name: statistics[name] if name in statistics else w[name] - lr * slope[name] for name in w}
                V, c = V - personal_lr * off.T @ z / len(idx), c - personal_lr * off.mean(axis=0)
            heads[i] = V, c
            mean = {name: total + weights[i] / mass * w[name] for name, total in mean.items()}
        shared = mean
        history.append({"shared": shared, "personal": [(shared, *(first if head is None else head)) for head in heads]})
    return history


def features(model, X):
    """(what the last layer multiplies, the logits) of the training pass."""
    logits, tape, _ = networks._forward(model, X, training=True)
    return tape[-1][1], logits


def predict(personal, X):
    model, V, c = personal
    logits, tape, _ = networks._forward(model, X, training=False)
    return logits + tape[-1][1] @ V.T + c


def softmax(z):
    q = np.exp(z - z.max(axis=1, keepdims=True))
    return q / q.sum(axis=1, keepdims=True)


RATES = {"lr": 0.3, "personal_lr": 0.15}
METHOD = ft.FedROD(lr=RATES["lr"], head_rate=RATES["personal_lr"] / RATES["lr"])


def on(problem):
    """The network with a second head."""
    return replace(problem, answer=lambda personal: predict(personal, problem.probe))


CASES = (
    *(Case(METHOD, RATES, name, STEPS_AND_EPOCHS, on(problem), 6) for name, problem in NETWORKS.items()),
    Case(METHOD, RATES, "classes missing", STEPS_AND_EPOCHS, replace(on(NETWORKS["mlp"]), clients=lacking), 6),
)


def agree(trial, seen, entry):
    """And what a client keeps is its head."""
    harness.agree(trial, seen, entry)
    for i, (_, V, c) in enumerate(entry["personal"]):
        if seen.store.born[i]:
            close(seen.kept(i), {"weight": V, "bias": c}, trial, f"the head of client {i}", seen)


def afterwards(trial, history):
    last = history[-1]
    assert gap(last["shared"], trial.start) > trial.case.learned
    assert all(np.abs(V).max() > 0.01 for _, V, _ in last["personal"])
