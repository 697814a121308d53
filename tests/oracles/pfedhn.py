"""pFedHN: Shamsian, Navon, Fetaya and Chechik (2021), Algorithm 1.

The server holds a network H with parameters phi and an embedding v_i per client; client i's model is theta_i = H(v_i; phi). A
sampled client receives theta_i, takes its local steps to theta~_i and sends the displacement d_i = theta~_i - theta_i. The
server moves along the product of d_i with the Jacobian of H, everything at the values of before the round:
    phi <- phi + server_lr sum_i p_i (d theta_i / d phi)' d_i,      v_i <- v_i + embedding_lr (d theta_i / d v_i)' d_i,
p_i being the weights of the round's clients, normalised: the paper samples one client at a time (p_i = 1). That is gradient
descent on -theta_i . d_i (the paper prints the other sign of d_i; its code has this one), by plain SGD; the released code's
momentum and weight decay are left out. A client predicts with theta_i of the newest phi and its newest v_i; its local model is
thrown away.

H is a multilayer perceptron: affine maps [(A, a), ...] with ReLU between, the last one gives the flat model (the paper's one
linear head per tensor are its rows, stacked).
"""

from dataclasses import replace

import numpy as np

import fedtailor as ft
from tests.oracles import harness
from tests.oracles.harness import FULL_AND_BATCHES, PERCEPTRON, Case, close, gap


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, server_lr, embedding_lr, network, embeddings):
    phi = [(np.array(A, dtype=float), np.array(a, dtype=float)) for A, a in network]
    v = [np.array(e, dtype=float) for e in embeddings]
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        total = [(np.zeros_like(A), np.zeros_like(a)) for A, a in phi]
        moved = list(v)
        for i in cohort:
            X, y = clients[i]
            theta = forward(phi, v[i])[0]
            w = theta.copy()
            for idx in batches(t, i, "train"):
                w = w - lr * grad(w, X[idx], y[idx])
            slopes, along = pull_back(phi, v[i], w - theta)
            total = [(B + weights[i] / mass * S, b + weights[i] / mass * s) for (B, b), (S, s) in zip(total, slopes, strict=True)]
            moved[i] = v[i] + embedding_lr * along
        phi = [(A + server_lr * B, a + server_lr * b) for (A, a), (B, b) in zip(phi, total, strict=True)]
        v = moved
        personal = [forward(phi, e)[0] for e in v]
        history.append({"shared": None, "personal": personal, "network": phi, "embeddings": [e.copy() for e in v]})
    return history


def forward(phi, v):
    """(theta, what each layer multiplied)."""
    h, seen = v, []
    for k, (A, a) in enumerate(phi):
        h = np.maximum(h, 0.0) if k else h
        seen.append(h)
        h = A @ h + a
    return h, seen


def pull_back(phi, v, d):
    """([(d theta / d A)' d, (d theta / d a)' d] by layer, (d theta / d v)' d)."""
    _, seen = forward(phi, v)
    slopes = []
    for k in reversed(range(len(phi))):
        slopes.append((np.outer(d, seen[k]), d.copy()))
        d = phi[k][0].T @ d
        if k:
            d = d * (seen[k] > 0)
    return slopes[::-1], d


RATES = {"lr": 0.2, "server_lr": 0.1, "embedding_lr": 0.3}
METHOD = ft.PFedHN(lr=0.2, epochs=2, hyper_lr=0.1, embedding_lr=0.3, hidden=7, layers=2, embedding=3)
SETTINGS = (*FULL_AND_BATCHES, harness.Setting(None, 1))  # the paper samples one client at a time


def stacked(net):
    """The package's hypernetwork as affine maps; the last one's rows are those of all heads, in the order of the model."""
    net = {name: leaf.numpy() for name, leaf in net.items()}
    hidden = sum(name.startswith("weight ") for name in net)
    heads = [name.removeprefix("to ") for name in net if name.startswith("to ")]
    last = [net[f"to {name}"].reshape(-1, net[f"to {name}"].shape[-1]) for name in heads]
    start = [net[f"start {name}"].ravel() for name in heads]
    return [*((net[f"weight {k}"], net[f"bias {k}"]) for k in range(hidden)), (np.concatenate(last), np.concatenate(start))]


def told(rates):
    """The rates, and the package's first hypernetwork and embeddings, which are drawn."""

    def with_the_first(trial):
        _, server = trial.plan.algorithm.init_server(trial.plan.task)
        return {**rates, "network": stacked(server["net"]), "embeddings": server["embeddings"].numpy()[trial.plan.ranks]}

    return with_the_first


CASES = (
    Case(METHOD, told(RATES), settings=SETTINGS, problem=PERCEPTRON),
    Case(
        replace(METHOD, embedding_lr=None, embedding=None, layers=1),
        told({**RATES, "embedding_lr": 0.1}),
        "one layer, one rate",
        problem=PERCEPTRON,
        learned=0.02,
    ),
    Case(METHOD, told(RATES), "linear", rounds=6),  # starts at zero: all models are the same until the heads have moved
)


def agree(trial, seen, entry):
    """And what the server holds."""
    harness.agree(trial, seen, entry)
    close(stacked(seen.server["net"]), entry["network"], trial, "the hypernetwork", seen)
    close(list(seen.server["embeddings"][trial.plan.ranks].numpy()), entry["embeddings"], trial, "embeddings", seen)


def afterwards(trial, history):
    first, last = trial.case.told(trial), history[-1]
    assert gap(last["network"], first["network"]) > trial.case.learned
    assert gap(last["embeddings"], list(first["embeddings"])) > 1e-3
    assert gap(last["personal"][0], last["personal"][1]) > 1e-3
