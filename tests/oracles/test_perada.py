"""The transcription of PerAda itself: against a NumPy forward pass differentiated by differences, and against its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.oracles import perada
from tests.oracles.differences import moved, relu, risk, rows, soft
from tests.oracles.harness import D, K, gap


def adapted(seed=2):
    draw = np.random.default_rng(seed)
    frozen = {"0.weight": draw.normal(size=(4, D)), "0.bias": draw.normal(size=4), "1.weight": draw.normal(size=(4, 4)) * 0.6}
    adapter = {"0.adapter.weight": draw.normal(size=(4, 4)) * 0.2, "1.bias": draw.normal(size=4) * 0.1}
    return frozen, adapter | {"1.adapter.weight": draw.normal(size=(4, 4)) * 0.2, "2.weight": draw.normal(size=(K, 4))}


def apart(a, b):
    return sum(((a[name] - b[name]) ** 2).sum() for name in a)


def logits(frozen, a, X):
    """The same network in NumPy."""
    z = X @ frozen["0.weight"].T + frozen["0.bias"]
    z = relu(z + z @ a["0.adapter.weight"].T) @ frozen["1.weight"].T + a["1.bias"]
    return relu(z + z @ a["1.adapter.weight"].T) @ a["2.weight"].T


@pytest.mark.parametrize("teach", ["logits", "probabilities"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_transcription_by_differences(teach, temperature):
    frozen, w = adapted()
    _, v = adapted(3)
    clients, public = [rows(0), rows(1)], [rows(2, 7)[0], rows(3, 4)[0]]
    batches = {"personal": [[0, 1, 2], [3, 4], [5, 6]], "train": [[7, 8], [9, 10, 1]]}
    thetas = []
    for X, y in clients:
        found_v, found = perada.client_round(frozen, w, v, X, y, batches["personal"], batches["train"], 0.2, 0.3, 0.7)
        own, theta = v, w
        for r in batches["personal"]:
            own = moved(own, 0.2, lambda a, X=X[r], y=y[r]: risk(logits(frozen, a, X), y) + 0.35 * apart(a, w))
        for r in batches["train"]:
            theta = moved(theta, 0.3, lambda a, X=X[r], y=y[r]: risk(logits(frozen, a, X), y))
        assert gap(found_v, own) < 1e-8
        assert gap(found, theta) < 1e-8
        thetas.append(theta)
    T = temperature
    found = perada.distil(frozen, thetas, public, 0.5, optimizer="sgd", temperature=T, teach=teach)
    student = {name: (thetas[0][name] + thetas[1][name]) / 2 for name in w}
    for X in public:
        outs = [logits(frozen, theta, X) for theta in thetas]
        p = soft((outs[0] + outs[1]) / 2 / T) if teach == "logits" else (soft(outs[0] / T) + soft(outs[1] / T)) / 2
        student = moved(student, 0.5, lambda a, X=X, p=p: (p * np.log(p / soft(logits(frozen, a, X) / T))).sum(1).mean())
    assert gap(found, student) < 1e-8
    assert gap(found, perada.average([perada._tree(t) for t in thetas])) > 1e-4


@pytest.mark.parametrize("cosine", [False, True])
def test_the_transcriptions_adam_and_cosine_are_torchs(cosine):
    frozen, _ = adapted()
    thetas = [perada._tree(adapted(s)[1]) for s in (4, 5, 6)]
    public = [rows(s, 6)[0] for s in range(5)]
    found = perada.distil(frozen, thetas, public, 0.02, cosine=cosine)
    a = {name: value.clone().requires_grad_() for name, value in perada.average(thetas).items()}
    u = perada._tree(frozen)
    optimizer = torch.optim.Adam(a.values(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5 if cosine else 10**12)
    for x in map(torch.from_numpy, public):
        optimizer.zero_grad()
        target = torch.softmax(sum(perada.mlp(perada.network(u, t), x) for t in thetas) / 3, 1)
        student = torch.log_softmax(perada.mlp(perada.network(u, a), x), 1)
        torch.nn.functional.kl_div(student, target, reduction="batchmean").backward()
        optimizer.step()
        schedule.step()
    assert gap(found, {name: value.detach() for name, value in a.items()}) < 1e-12
    assert gap(found, perada.average(thetas)) > 1e-2


def test_the_transcriptions_limits():
    frozen, w = adapted()
    clients = [rows(i) for i in range(3)]
    cut = [[0, 1, 2], [3, 4]]
    told = {"personal_lr": 0.2, "lr": 0.2}
    history = perada.rounds(frozen, w, clients, [[0, 1], [1, 2]], lambda t, i, p: cut, None, lam=0.0, **told)
    own = perada._tree(w)
    for _ in range(2):  # without lam the personal pass is local training, carried over
        own, _ = perada.client_round(frozen, w, own, *clients[1], cut, [], 0.2, 0.2, 0.0)
    assert gap(history[1]["personal"][1], own) == 0
    assert history[0]["personal"][2] is None
    plain = [perada.client_round(frozen, w, w, *clients[i], [], cut, 0.2, 0.2, 9.0)[1] for i in (0, 1)]
    assert gap(history[0]["w"], {k: (plain[0][k] + plain[1][k]) / 2 for k in w}) < 1e-15
    one = perada.distil(frozen, plain[:1], [rows(5)[0]], 0.1, optimizer="sgd")
    assert gap(one, plain[0]) < 1e-15  # one teacher is its own student
