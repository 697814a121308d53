"""FedBN: Li et al. (2021), on the networks of networks.py.

Batch-norm layers, affine parameters and running statistics alike, belong to the client; all other parameters are
received, trained together with them in one descent, and averaged. A client's norms start where the model starts.
"""

import numpy as np

import fedtailor as ft
from tests.oracles import harness
from tests.oracles.harness import NETWORKS, STEPS_AND_EPOCHS, Case, close, gap
from tests.oracles.networks import is_norm, owner, paths


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr):
    at_home = [name for path in paths(start) if is_norm(start, path) for name in start if owner(name) == path]
    shared = {name: value.copy() for name, value in start.items() if name not in at_home}
    own = [{name: start[name].copy() for name in at_home} for _ in clients]
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean = {name: np.zeros_like(value) for name, value in shared.items()}
        for i in cohort:
            X, y = clients[i]
            w = _join(start, shared, own[i])
            for idx in batches(t, i, "train"):
                slope, statistics = grad(w, X[idx], y[idx])
                w = {name: statistics[name] if name in statistics else w[name] - lr * slope[name] for name in w}
            own[i] = {name: w[name] for name in at_home}
            mean = {name: total + weights[i] / mass * w[name] for name, total in mean.items()}
        shared = mean
        history.append({"shared": shared, "personal": [_join(start, shared, norms) for norms in own]})
    return history


def _join(start, shared, norms):
    """One model again, its names in the order of the start: the order of the layers."""
    return {name: norms[name] if name in norms else shared[name] for name in start}


CASES = (Case(ft.FedBN(lr=0.3), {"lr": 0.3}, settings=STEPS_AND_EPOCHS, problem=NETWORKS["normed"], rounds=6),)


def agree(trial, seen, entry):
    """And what a client keeps is its norms."""
    harness.agree(trial, seen, entry)
    for i, theirs in enumerate(entry["personal"]):
        if seen.store.born[i]:
            norms = {name: value for name, value in theirs.items() if name not in entry["shared"]}
            close(seen.kept(i)["model"], norms, trial, f"what client {i} keeps", seen)


def afterwards(trial, history):
    harness.learned(trial, history)
    first, second = history[-1]["personal"][:2]
    norms = [name for name in first if name not in history[-1]["shared"]]
    assert all(gap(first[name], second[name]) > 1e-3 for name in norms)  # parameters and statistics of both norms differ
