"""PerAda, round by round, against a transcription of Algorithm 1 in plain PyTorch (tests/oracles/perada.py), in float64; and the
transcription against a NumPy forward differentiated by differences, and against its limits.

The oracle is given the row numbers that the package drew, nothing else.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.run import build_task, cohort_of, make_plan, play
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.runs.store import Store
from tests.oracles import perada

D, K, ROUNDS, SEED, TOLERANCE = 3, 3, 4, 4, 1e-7


class Adapted(nn.Linear):
    """z + A z + b with z = W x + c: a frozen layer and its adapter."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.adapter = nn.Linear(outputs, outputs)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)

    def forward(self, input):
        z = super().forward(input)
        return z + self.adapter(z)


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(Adapted(D, 5), nn.ReLU(), Adapted(5, 4), nn.ReLU(), nn.Linear(4, K)).double()


def data():
    draw = np.random.default_rng(7)
    clients = []
    for i, n in enumerate((9, 14, 5, 11)):
        x = draw.normal(size=(n, D)) + 0.4 * i
        clients.append((x, np.r_[0, 1, 2, draw.integers(0, K, n - 3)]))
    return clients, draw.normal(size=(23, D))


# settings of the method; what the oracle is told of the distillation (None: there is none)
KD = {"kd_steps": 7, "kd_lr": 0.02, "kd_batch": 5}
CASES = {
    "plain": (KD, {"lr": 0.02}),
    "no kd": ({"kd_steps": 0}, None),
    "cosine": ({**KD, "kd_schedule": "cosine"}, {"lr": 0.02, "cosine": True}),
    "temperature": ({**KD, "temperature": 2.5}, {"lr": 0.02, "temperature": 2.5}),
    "probabilities": (
        {**KD, "teach": "probabilities", "temperature": 1.5},
        {"lr": 0.02, "teach": "probabilities", "temperature": 1.5},
    ),
    "all public rows": ({**KD, "kd_batch": 100}, {"lr": 0.02}),
    "personal work": ({**KD, "personal_lr": 0.3, "personal_steps": 5}, {"lr": 0.02}),
}


@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
@pytest.mark.parametrize(("size", "weights"), [(4, "uniform"), (2, "uniform"), (3, "size")])
@pytest.mark.parametrize("case", CASES)
def test_perada_follows_algorithm_1_round_by_round(case, size, weights, engine):
    settings, kd = CASES[case]
    method = ft.PerAda(lr=0.2, lam=0.7, steps=3, **settings)
    clients, public = data()
    federation = ft.Federation.from_arrays(clients, clients, public=public).to(torch.float64)
    task = build_task(net(), federation, 0, torch.float64, bias=True)
    plan = make_plan(method, task, federation, 4, SEED, weights)
    drawn = {}

    def batches(t):
        rows, index, _ = method.lessons(task, drawn[t])
        return [public[rows[i[i >= 0]]] for i in map(torch.from_numpy, index)]

    def phase(t, i, name):
        return plan.feed.rows(i, t, name if name in plan.feed.phases else "train")

    moving = list(task.init())
    assert set(moving) == {f"{layer}.adapter.{leaf}" for layer in (0, 2) for leaf in ("weight", "bias")} | {"4.weight", "4.bias"}
    engine = engine(plan, **({"workers": 1} if engine is LoopEngine else {}))
    shared, server = method.init_server(task)
    store, found = Store(len(clients)), []
    for rnd, (w, _) in play(engine, shared, server, store, ROUNDS, size, SEED):
        drawn[rnd.number] = rnd
        own = [engine.personal(w, i, store)["model"] if store.born[i] else None for i in range(len(clients))]
        found.append((w["model"], own))
    expected = perada.rounds(
        dict(task.held),
        task.init(),
        clients,
        [cohort_of(federation, method, size, SEED, t).tolist() for t in range(ROUNDS)],
        phase,
        batches,
        personal_lr=settings.get("personal_lr", 0.2),
        lr=0.2,
        lam=0.7,
        kd=kd,
        first="received",
        weights=None if weights == "uniform" else plan.weights,
    )
    for t, ((w, own), want) in enumerate(zip(found, expected, strict=True)):
        assert gap(w, want["w"]) <= TOLERANCE, f"shared in round {t}"
        for i, (mine, theirs) in enumerate(zip(own, want["personal"], strict=True)):
            assert (mine is None) == (theirs is None)
            assert mine is None or gap(mine, theirs) <= TOLERANCE, f"client {i} in round {t}"
    assert gap(found[-1][0], task.init()) > 1e-2
    if kd is not None:
        assert gap(expected[-1]["w"], expected[-1]["mean"]) > 1e-3  # distillation has done something


# -- the transcription itself ------------------------------------------------------------------------------------------
def rows(seed=0, n=11):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(n, D)), draw.integers(0, K, n)


def gap(a, b):
    return max(float((torch.as_tensor(a[name]) - torch.as_tensor(b[name])).abs().max()) for name in a)


def relu(z):
    return np.maximum(z, 0)


def soft(z):
    q = np.exp(z - z.max(1, keepdims=True))
    return q / q.sum(1, keepdims=True)


def risk(out, y):
    return -np.log(soft(out)[np.arange(len(y)), y]).mean()


def moved(model, lr, function, h=1e-6):
    """A step of descent by central differences in every entry."""
    point, new = ({name: np.array(value) for name, value in model.items()} for _ in range(2))
    for name, a in point.items():
        for at in np.ndindex(a.shape):
            keep = a[at]
            a[at] = keep + h
            above = function(point)
            a[at] = keep - h
            new[name][at] -= lr * (above - function(point)) / (2 * h)
            a[at] = keep
    return new


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
