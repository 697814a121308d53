"""FedAvg with compressed uploads and error feedback: Stich, Cordonnier and Jaggi (2018), Algorithm 1.

A sampled client trains from the received w, u = y - w being its displacement, and sends C(u + e_i); what was left out stays
with it as e_i <- u + e_i - C(u + e_i), and is added to its next upload. e_i begins at zero; who is not sampled keeps it. The
server adds server_lr times the weighted mean of the C(u + e_i) of the round. (Stich et al. put the step size into what is
remembered; with the displacement, which has it already, that is the same.) ``feedback=False`` forgets what was left out.

C works on every tensor for itself; ``tensors`` are the places of each in the flat model.
- ``top_k(share)``: the k = max(1, ceil(share * size)) entries of largest magnitude, unchanged; equal magnitudes go to the
  lower place.
- ``eight_bits``: q = round(v / s) with s = max|v| / 127, to the nearest whole number and ties to the even one (numpy's rint),
  sent as s q; a tensor of zeros stays zero. Nothing is random.
"""

import math

import numpy as np

import fedtailor as ft
from tests.oracles import harness
from tests.oracles.harness import BIASED, BIASES, PERCEPTRON, STEPS_AND_EPOCHS, WEIGHTS, Case, close


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, server_lr, compress, tensors, feedback=True):
    shared = np.array(start, dtype=float)
    left = [np.zeros_like(shared) for _ in clients]
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        move = np.zeros_like(shared)
        for i in cohort:
            X, y = clients[i]
            w = shared.copy()
            for idx in batches(t, i, "train"):
                w = w - lr * grad(w, X[idx], y[idx])
            wanted = w - shared + left[i]
            sent = np.zeros_like(wanted)
            for at in tensors:
                sent[at] = compress(wanted[at])
            left[i] = wanted - sent if feedback else left[i]
            move = move + weights[i] / mass * sent
        shared = shared + server_lr * move
        history.append({"shared": shared.copy(), "personal": [shared.copy() for _ in clients], "left": [e.copy() for e in left]})
    return history


def top_k(share):
    def compress(v):
        k = max(1, math.ceil(share * v.size))
        kept = np.argsort(-np.abs(v), kind="stable")[:k]
        sparse = np.zeros_like(v)
        sparse[kept] = v[kept]
        return sparse

    return compress


def eight_bits(v):
    scale = np.abs(v).max() / 127.0
    return np.zeros_like(v) if scale == 0 else scale * np.rint(v / scale)


def both(share):
    """The largest entries, in eight bits."""
    return lambda v: eight_bits(top_k(share)(v))


LAYERS = np.split(np.arange(18 + 6 + 30 + 5 + 15 + 3), np.cumsum([18, 6, 30, 5, 15]))  # of 3, 6, 5 and 3 units
PROBLEMS = {"linear": (BIASED, (WEIGHTS, BIASES)), "mlp": (PERCEPTRON, LAYERS)}
# the paper's k is a number: shares of which the package and the above make the same one, of each of these sizes
HOW = {
    "a third": ({"keep": 1 / 3}, top_k(1 / 3)),
    "half": ({"keep": 0.5}, top_k(0.5)),
    "eight bits": ({"bits": 8}, eight_bits),
    "a third in eight bits": ({"keep": 1 / 3, "bits": 8}, both(1 / 3)),
}
RATES = {"lr": 0.2, "server_lr": 0.8}


def case(model, how):
    problem, tensors = PROBLEMS[model]
    fields, compress = HOW[how]
    method = ft.Compressed(method=ft.FedAvg(**RATES), **fields)
    return Case(method, {**RATES, "compress": compress, "tensors": tensors}, f"{model}, {how}", STEPS_AND_EPOCHS, problem, 6)


CASES = tuple(case(model, how) for model in PROBLEMS for how in HOW)


def agree(trial, seen, entry):
    """And what a client has left out."""
    model = harness.in_a_row(seen.shared["model"])
    close(model, entry["shared"], trial, "shared", seen)
    for i, theirs in enumerate(entry["left"]):
        close(trial.case.problem.read(seen.logits[i]), trial.case.problem.answer(entry["shared"]), trial, f"client {i}", seen)
        assert seen.store.born[i] or not theirs.any(), seen.where
        if seen.store.born[i]:
            close(harness.in_a_row(seen.kept(i)["left out"]), theirs, trial, f"what client {i} left out", seen)


def afterwards(trial, history):
    harness.learned(trial, history)
    assert all(e.any() for e in history[-1]["left"])
    told = {**trial.case.told, "feedback": False}
    forgetful = harness.replace(trial, case=harness.replace(trial.case, told=told)).follow()
    assert harness.gap(forgetful[-1]["shared"], history[-1]["shared"]) > 1e-4
