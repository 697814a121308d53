"""PartialFed-Adaptive: Sun et al. (2021), from memory, through the fact sheet; their trainer was not released.

A client keeps its weights v and, per layer, the logits a = (shared, own). Each draw adds Gumbel noise e to the logits
and takes the larger, shared if equal. One draw decides from which weights the layers start; training from there
gives w, which is kept and sent. The logits then descend on the risk of the mixture W of the received g and w, a fresh
draw in each step, straight through: the value of W is that of the draw h, its slope that of softmax((a + e)/tau).
A client predicts with the layers of the larger logit, with no noise, against the newest shared model.

The fact sheet alternates epochs on weights and on logits and leaves open what the logits' risk is taken at, the
temperature's law and the start: W, tau = max(coldest, temperature cooling^t) and zero logits are ours.
Models are dicts of arrays, grad(model, X, y) gives (gradient, running statistics after the pass) as in networks.py;
keys(t, i, phase) are the words that the package drew for the steps. Statistics start and travel with their layer; a
training pass normalises with its batch, so the logits' slope has no term for them.
"""

from dataclasses import replace

import numpy as np

import fedtailor as ft
from fedtailor.data.batches import step_keys
from tests.oracles import harness
from tests.oracles.harness import NETWORKS, STEPS_AND_EPOCHS, Case, Setting, close, gap

MASK = 2**64 - 1


def run(grad, clients, start, *, rounds, batches, keys, cohorts, weights, lr, logit_lr, temperature, cooling, coldest):
    shared = {name: np.array(value, dtype=float) for name, value in start.items()}
    own, logits = [None] * len(clients), [None] * len(clients)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        tau = max(coldest, temperature * cooling**t)
        move = {name: np.zeros_like(value) for name, value in shared.items()}
        drawn = {}
        for i in cohort:
            X, y = clients[i]
            v = shared if own[i] is None else own[i]
            a = np.zeros((len(layers(shared)), 2)) if logits[i] is None else logits[i]
            drawn[i] = take_shared(a + gumbel(keys(t, i, "train")[0], len(a)))
            w = mixture(shared, v, drawn[i])
            for idx in batches(t, i, "train"):
                slope, statistics = grad(w, X[idx], y[idx])
                w = {name: statistics[name] if name in statistics else w[name] - lr * slope[name] for name in w}
            for idx, key in zip(batches(t, i, "logits"), keys(t, i, "logits"), strict=True):
                a = a - logit_lr * logit_gradient(grad, shared, w, a, gumbel(key, len(a)), tau, X[idx], y[idx])
            own[i], logits[i] = w, a
            move = {name: total + weights[i] / mass * (w[name] - shared[name]) for name, total in move.items()}
        shared = {name: value + move[name] for name, value in shared.items()}
        personal = [shared if v is None else mixture(shared, v, take_shared(a)) for v, a in zip(own, logits, strict=True)]
        history.append({"shared": shared, "personal": personal, "own": list(own), "logits": list(logits), "drawn": drawn})
    return history


def logit_gradient(grad, shared, w, a, e, tau, X, y):
    """d risk / d a of h + s - stop(s), [layers, 2]: the slope along g - w in each layer, times s_0's derivative."""
    slope, _ = grad(mixture(shared, w, take_shared(a + e)), X, y)
    s = softmax((a + e) / tau)
    along = np.array([sum(np.sum(slope[n] * (shared[n] - w[n])) for n in names if n in slope) for names in layers(shared)])
    d = s[:, 0] * s[:, 1] / tau * along
    return np.stack([d, -d], 1)


def softmax(z):
    s = np.exp(z - z.max(1, keepdims=True))
    return s / s.sum(1, keepdims=True)


def take_shared(scores):
    return scores[:, 0] >= scores[:, 1]


def mixture(shared, own, from_shared):
    chosen = {}
    for names, yes in zip(layers(shared), from_shared, strict=True):
        chosen |= {name: (shared if yes else own)[name] for name in names}
    return {name: chosen[name] for name in shared}


def layers(model):
    """The names of each layer: parameters and statistics that stand in one module, by first appearance."""
    found = {}
    for name in model:
        found.setdefault(name.removeprefix("buffer:").rpartition(".")[0], []).append(name)
    return list(found.values())


def gumbel(key, count):
    """Noise [count, 2] of a 64-bit key: SplitMix64's finaliser on a counter, 24 bits to the middle of their cell."""
    begin = finalise(int(key) + 0x9E3779B97F4A7C15 * (2**32 + 1))
    words = [finalise(begin + j * 0xD1342543DE82EF95) for j in range(2 * count)]
    u = (np.array([word >> 40 for word in words], dtype=float) + 0.5) / 2**24
    return -np.log(-np.log(u)).reshape(count, 2)


def finalise(z):
    z &= MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


# both branches of the temperature are walked in six rounds, and logits that move far make the choices differ
TOLD = {"lr": 0.3, "logit_lr": 2.0, "temperature": 2.0, "cooling": 0.6, "coldest": 0.5}
METHOD = ft.PartialFed(**TOLD)
LEAST = {"logit_lr": np.nextafter(0.0, 1.0)}  # zero is refused; times a slope below a half this is zero
ONE = (Setting(5, 3, "size", {"epochs": 2}),)


def told(settings):
    """The settings, and the words that the package drew for the steps."""

    def with_keys(trial):
        feed = trial.plan.feed

        def keys(t, i, phase):
            ids = np.array([i])
            return step_keys(feed.keys(ids, t, phase), int(feed.steps(ids, phase)[0]))[0]

        return {**settings, "keys": keys}

    return with_keys


CASES = (
    *(Case(METHOD, told(TOLD), name, STEPS_AND_EPOCHS, problem, 6) for name, problem in NETWORKS.items()),
    Case(replace(METHOD, logit_steps=5), told(TOLD), "more work on logits", ONE, NETWORKS["mlp"], 6),
    Case(replace(METHOD, **LEAST), told({**TOLD, **LEAST}), "equal logits", ONE, NETWORKS["mlp"], 6),
)


def agree(trial, seen, entry):
    """And what a client keeps is its own weights and its logits."""
    harness.agree(trial, seen, entry)
    for i, own in enumerate(entry["own"]):
        assert seen.store.born[i] == (own is not None), seen.where
        if own is not None:
            close(seen.kept(i)["model"], own, trial, f"what client {i} keeps", seen)
            close(seen.kept(i)["logits"], entry["logits"][i], trial, f"logits of client {i}", seen)


def afterwards(trial, history):
    last, start = history[-1], trial.start
    assert gap(last["shared"], start) > trial.case.learned
    drawn = np.stack([yes for entry in history[1:] for yes in entry["drawn"].values()])
    assert (drawn.any(0) & ~drawn.all(0)).all()  # every layer has begun from both
    chosen = np.concatenate([take_shared(a) for entry in history for a in entry["logits"] if a is not None])
    if trial.case.label == "equal logits":  # the shared layer is taken, though every client has its own
        assert not np.any(last["logits"])
        assert all(gap(client, last["shared"]) == 0 for client in last["personal"])
        assert all(gap(own, last["shared"]) > 1e-3 for own in last["own"])
    else:
        assert min(np.abs(a).max() for a in last["logits"]) > 0.01
    if trial.case.label == "normed" and trial.setting.batch:
        assert chosen.any()  # predictions with layers of either kind
        assert not chosen.all()
    if trial.case.label == "more work on logits":
        usual = harness.Trial(trial.oracle, replace(trial.case, method=METHOD), trial.setting).follow()
        assert gap(last["logits"][0], usual[-1]["logits"][0]) > 1e-3
