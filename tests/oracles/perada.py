"""PerAda: Xie et al. (2024), Algorithm 1, in plain PyTorch, float64; a model is a dict of tensors by name.

`frozen` is u, an adapter is a dict of the other entries (head included). A sampled client takes S steps of its kept v
towards the received w, with gradient of L(v) + lam/2 |v - w|^2 (line 10), and E plain steps of theta from w (line 15).
The server starts at the plain mean of the thetas (line 18) and descends
mean_x KL(softmax(t(x)/T) || softmax(f(u, w; x)/T)) (line 21), t the mean of the teachers' logits; teachers are the thetas of
this round. Section 7's server takes Adam. No factor T^2, no weight decay, no gate: the paper has none.
"""

import math

import numpy as np
import torch
from torch import nn

import fedtailor as ft
from tests.make import seeded
from tests.oracles.harness import Case, D, K, Problem, Setting, close, gap


def mlp(params, x):
    """Linear layers in the order of the names, ReLU before each but the first; one called adapter is h + (A h + b), without ReLU.

    So `0, 0.adapter, 1` is W1 relu(z + A z + b) with z = W0 x: a series residual adapter ahead of the activation.
    """
    h = torch.as_tensor(x).reshape(len(x), -1)
    names = list(dict.fromkeys(name.rpartition(".")[0] for name in params))
    for k, name in enumerate(names):
        adapter = "adapter" in name
        z = h if adapter or k == 0 else torch.relu(h)
        out = z @ params[f"{name}.weight"].T
        if f"{name}.bias" in params:
            out = out + params[f"{name}.bias"]
        h = h + out if adapter else out
    return h


def network(frozen, adapter, names=None):
    """One model out of both parts, in the order of `names`; without names by number and, among equals, layer first."""
    whole = {**frozen, **adapter}
    return {name: whole[name] for name in (names or sorted(whole, key=_place))}


def _place(name):
    layer, _, leaf = name.rpartition(".")
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in layer.split(".")], leaf


def client_round(frozen, w, v, x, y, rows_personal, rows_local, personal_lr, lr, lam, *, names=None, apply=mlp, loss="ce"):
    """Lines 7-16: (v', theta). The two passes do not see each other; both see the w received."""
    x, y = _double(x), _double(y)
    frozen, w, v = _tree(frozen), _tree(w), _tree(v)

    def risk(adapter, r):
        return _risk(apply(network(frozen, adapter, names), x[r]), y[r], loss)

    for r in map(_index, rows_personal):
        slope = gradient(lambda a, r=r: risk(a, r), v)
        v = {name: v[name] - personal_lr * (slope[name] + lam * (v[name] - w[name])) for name in v}
    theta = w
    for r in map(_index, rows_local):
        slope = gradient(lambda a, r=r: risk(a, r), theta)
        theta = {name: theta[name] - lr * slope[name] for name in theta}
    return v, theta


def average(thetas, weights=None):
    """Line 18: plain, unless weights are given."""
    weights = [1.0] * len(thetas) if weights is None else weights
    total = sum(weights)
    return {name: sum(p / total * theta[name] for theta, p in zip(thetas, weights, strict=True)) for name in thetas[0]}


def ensemble(frozen, thetas, x, temperature=1.0, teach="logits", names=None, apply=mlp):
    """The teachers' distribution [rows, classes]: softmax of the mean logits, or the mean of the softmaxes."""
    with torch.no_grad():
        logits = torch.stack([apply(network(frozen, theta, names), x) for theta in thetas])
        if teach == "logits":
            return torch.softmax(logits.mean(0) / temperature, 1)
        return torch.softmax(logits / temperature, 2).mean(0)


def kl(target, logits, temperature=1.0):
    """Mean over rows of KL(target || softmax(logits / T))."""
    logs = torch.log_softmax(logits / temperature, 1)
    return (torch.special.xlogy(target, target) - target * logs).sum(1).mean()


def distil(
    frozen,
    thetas,
    batches,
    lr,
    *,
    start=None,
    temperature=1.0,
    teach="logits",
    optimizer="adam",
    cosine=False,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weights=None,
    names=None,
    apply=mlp,
):
    """Lines 17-22: w after one step per public batch, from the average (or `start`). Moments begin at zero in each round.

    cosine: step r of R (r = 0, 1, ...) has the rate lr (1 + cos(pi r / R)) / 2, which would be zero at r = R.
    """
    frozen, thetas = _tree(frozen), [_tree(theta) for theta in thetas]
    w = average(thetas, weights) if start is None else _tree(start)
    batches = [_double(x) for x in batches]
    m, s = ({name: torch.zeros_like(value) for name, value in w.items()} for _ in range(2))
    for r, x in enumerate(batches):
        rate = lr * (1 + math.cos(math.pi * r / len(batches))) / 2 if cosine else lr
        target = ensemble(frozen, thetas, x, temperature, teach, names, apply)
        g = gradient(lambda a, t=target, x=x: kl(t, apply(network(frozen, a, names), x), temperature), w)
        if optimizer == "sgd":
            w = {name: w[name] - rate * g[name] for name in w}
            continue
        m = {name: beta1 * m[name] + (1 - beta1) * g[name] for name in w}
        s = {name: beta2 * s[name] + (1 - beta2) * g[name] ** 2 for name in w}
        unbiased = {name: (m[name] / (1 - beta1 ** (r + 1)), s[name] / (1 - beta2 ** (r + 1))) for name in w}
        w = {name: w[name] - rate * unbiased[name][0] / (unbiased[name][1].sqrt() + eps) for name in w}
    return w


def rounds(
    frozen,
    start,
    clients,
    cohorts,
    rows,
    public,
    *,
    personal_lr,
    lr,
    lam,
    kd=None,
    first="initial",
    weights=None,
    phases=("personal", "train"),
    names=None,
    apply=mlp,
    loss="ce",
):
    """One entry {"w", "mean", "personal", "thetas"} per cohort; "personal" holds None for who was never sampled.

    rows(t, i, phase) are a client's batches, public(t) the server's (x alone); kd holds what distil is told, None is
    PerAda without KD. first: v of a client new to training is the w^0 of all ("initial", Algorithm 1's v_m^0) or the w
    it receives ("received"). weights[i] replaces the plain mean of line 18.
    """
    w = _tree(start)
    own, history = [None] * len(clients), []
    for cohort in cohorts:
        t, thetas = len(history), []
        for i in cohort:
            v = own[i] if own[i] is not None else {"initial": _tree(start), "received": w}[first]
            batches = [rows(t, i, phase) for phase in phases]
            how = {"names": names, "apply": apply, "loss": loss}
            own[i], theta = client_round(frozen, w, v, *clients[i], *batches, personal_lr, lr, lam, **how)
            thetas.append(theta)
        part = None if weights is None else [weights[i] for i in cohort]
        plain = average(thetas, part)
        w = plain if kd is None else distil(frozen, thetas, public(t), weights=part, names=names, apply=apply, **kd)
        history.append({"w": w, "mean": plain, "personal": list(own), "thetas": thetas})
    return history


def gradient(function, tree):
    frozen = {name: value.clone().requires_grad_() for name, value in tree.items()}
    slopes = torch.autograd.grad(function(frozen), list(frozen.values()))
    return dict(zip(frozen, slopes, strict=True))


def _risk(out, y, loss):
    if loss == "ce":
        return torch.nn.functional.cross_entropy(out, y)
    return ((out - y.reshape(out.shape)) ** 2).mean() / 2


def _tree(values):
    return {name: _double(value) for name, value in values.items()}


def _double(value):
    value = torch.as_tensor(value).detach().clone()
    return value.double() if value.is_floating_point() else value.long()


def _index(rows):
    return torch.as_tensor(np.asarray(rows, dtype=np.int64))


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


def adapted():
    return nn.Sequential(Adapted(D, 5), nn.ReLU(), Adapted(5, 4), nn.ReLU(), nn.Linear(4, K))


PUBLIC = np.random.default_rng(8).normal(size=(23, D))
PROBE = np.random.default_rng(3).normal(size=(6, D))
PROBLEM = Problem(lambda: seeded(adapted, seed=1), gradient, lambda task: task.init(), PROBE, answer=None, public=lambda: PUBLIC)
SETTINGS = (Setting(4, 4), Setting(4, 2), Setting(4, 3, "size"))
KD = {"kd_steps": 7, "kd_lr": 0.02, "kd_batch": 5}


def case(label, settings, kd):
    """``kd`` is what the transcription is told of the distillation (None: there is none)."""
    method = ft.PerAda(lr=0.2, lam=0.7, steps=3, **settings)
    return Case(method, {"kd": kd}, label, SETTINGS, PROBLEM, rounds=4, tolerance=1e-7)


CASES = (
    case("", KD, {"lr": 0.02}),
    case("no kd", {"kd_steps": 0}, None),
    case("cosine", {**KD, "kd_schedule": "cosine"}, {"lr": 0.02, "cosine": True}),
    case("temperature", {**KD, "temperature": 2.5}, {"lr": 0.02, "temperature": 2.5}),
    case(
        "probabilities",
        {**KD, "teach": "probabilities", "temperature": 1.5},
        {"lr": 0.02, "teach": "probabilities", "temperature": 1.5},
    ),
    case("all public rows", {**KD, "kd_batch": 100}, {"lr": 0.02}),
    case("personal work", {**KD, "personal_lr": 0.3, "personal_steps": 5}, {"lr": 0.02}),
)


def follow(trial):
    task, method = trial.plan.task, trial.case.method

    def public(t):
        rows, index, _ = method.lessons(task, trial.round(t))
        return [PUBLIC[rows[i[i >= 0]]] for i in map(torch.from_numpy, index)]

    return rounds(
        dict(task.frozen),
        task.init(),
        trial.clients,
        [trial.cohort(t) for t in range(trial.case.rounds)],
        trial.batches,
        public,
        personal_lr=method.lr if method.personal_lr is None else method.personal_lr,
        lr=method.lr,
        lam=method.lam,
        first="received",
        weights=None if trial.setting.weights == "uniform" else trial.plan.weights,
        **trial.case.told,
    )


def agree(trial, seen, entry):
    close(seen.shared["model"], entry["w"], trial, "shared", seen)
    frozen = _tree(trial.plan.task.frozen)
    for i, theirs in enumerate(entry["personal"]):
        assert seen.store.born[i] == (theirs is not None), seen.where
        if theirs is not None:
            close(seen.engine.personal(seen.shared, i, seen.store)["model"], theirs, trial, f"client {i}", seen)
        model = network(frozen, entry["w"] if theirs is None else theirs)
        close(seen.logits[i], mlp(model, PROBE), trial, f"what client {i} predicts", seen)


def afterwards(trial, history):
    start, last = trial.start, history[-1]
    layers = {f"{layer}.adapter.{leaf}" for layer in (0, 2) for leaf in ("weight", "bias")}
    assert set(start) == layers | {"4.weight", "4.bias"}
    assert gap(last["w"], start) > 1e-2
    if trial.case.told["kd"] is not None:
        assert gap(last["w"], last["mean"]) > 1e-3  # distillation has done something
