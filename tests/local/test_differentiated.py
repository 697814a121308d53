"""Differentiating through ``descend``: bilevel methods and MAML, on either engine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

import fedtailor as ft
from fedtailor import tree
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.setup import build_task, make_plan
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import InvalidArgument
from fedtailor.local import SGD, Adam, Private, alternate, descend, prox
from fedtailor.local.loop import Turn, gradient_on
from fedtailor.runs.store import Store
from fedtailor.task import Task
from tests.make import batches, federation, normal, seeded

X, Y = normal(9, 3), torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1])
STEPS = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
WHOLE = {"x": X, "y": Y, "key": torch.tensor(1)}
MODULES = {
    "linear": lambda: nn.Linear(3, 2),
    "network": lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
}
OPTS = {
    "sgd": SGD(lr=0.3),
    "momentum": SGD(lr=0.3, momentum=0.9, weight_decay=0.1),
    "adam": Adam(lr=0.05),
    "ball": SGD(lr=0.3, radius=0.8),
}


def padded():
    """The same steps as tensors, with a padded row in each."""
    index = torch.tensor([[*rows, rows[0]] for rows in STEPS])
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64).expand(3, 4)
    return {"x": X[index], "y": Y[index], "mask": mask, "key": torch.arange(3)}


def numeric(function, params, name):
    """The derivative in one parameter by central differences."""
    out = torch.zeros_like(params[name])
    for place in range(out.numel()):
        step = torch.zeros(out.numel(), dtype=out.dtype)
        step[place] = 1e-6
        up, down = (function({**params, name: params[name] + sign * step.view(out.shape)}) for sign in (1, -1))
        out.view(-1)[place] = (up - down) / 2e-6
    return out


@pytest.mark.parametrize("opt", OPTS)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("form", ["walked", "padded"])
def test_the_derivative_through_descend_is_that_of_finite_differences(module, opt, form):
    task = Task.from_module(seeded(MODULES[module]))
    data = batches(X, Y, STEPS) if form == "walked" else padded()
    params = task.init()

    def after(start):
        return task.risk(descend(task.risk, start, data, OPTS[opt], prox(params, 0.5)), WHOLE)

    found = grad(after)(params)
    for name in (n for n in params if not tree.is_buffer(n)):
        torch.testing.assert_close(found[name], numeric(after, params, name), rtol=1e-5, atol=1e-7)
    assert any(float(leaf.abs().max()) > 1e-3 for leaf in found.values())


class Attention(nn.Module):
    """Three words of two numbers that attend to each other."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Linear(3, 6), nn.Linear(2, 2)

    def forward(self, x):
        words = self.words(x).view(-1, 1, 3, 2)
        return self.out(F.scaled_dot_product_attention(words, words, words).mean((1, 2)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of its fused kernel under vmap
@pytest.mark.parametrize("form", ["walked", "padded"])
def test_a_descent_of_a_network_with_attention_is_differentiated_through(form):
    """Before, on the loop engine: torch's fused kernel of attention had no second derivative."""
    task = Task.from_module(seeded(Attention))
    data = batches(X, Y, STEPS) if form == "walked" else padded()

    def after(start):
        return task.risk(descend(task.risk, start, data, OPTS["sgd"]), WHOLE)

    found = grad(after)(task.init())
    torch.testing.assert_close(found["words.weight"], numeric(after, task.init(), "words.weight"), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("module", MODULES)
def test_the_end_is_the_same_whether_somebody_differentiates_or_not(module):
    task = Task.from_module(seeded(MODULES[module]))
    params, data = task.init(), batches(X, Y, STEPS)
    plain = descend(task.risk, params, data, SGD(lr=0.3))
    taped = descend(task.risk, tree.map(lambda p: p.clone().requires_grad_(), params), data, SGD(lr=0.3))
    for name, leaf in plain.items():
        torch.testing.assert_close(taped[name].detach(), leaf, rtol=1e-12, atol=1e-14)
        assert not leaf.requires_grad


def test_a_center_of_the_pull_and_what_a_risk_closes_over_are_differentiated_too():
    task = Task.from_module(seeded(MODULES["linear"]))
    start, data = task.init(), batches(X, Y, STEPS)

    def by_center(center):
        return task.risk(descend(task.risk, start, data, SGD(lr=0.3), prox(center, 0.7)), WHOLE)

    def by_shift(shift):
        def risk(p, batch):
            return task.risk(tree.add(p, shift), batch)

        return task.risk(descend(risk, start, data, SGD(lr=0.3)), WHOLE)

    for function in (by_center, by_shift):
        torch.testing.assert_close(grad(function)(start)["weight"], numeric(function, start, "weight"), rtol=1e-5, atol=1e-7)


def test_alternating_steps_are_differentiated_too():
    task = Task.from_module(seeded(MODULES["linear"]))
    data = batches(X, Y, STEPS)
    turns = [Turn("own", lambda p, b: task.risk(tree.add(p["own"], p["common"]), b), SGD(lr=0.3))]

    def after(start):
        return task.risk(alternate(turns, {"own": start, "common": task.init()}, data)["own"], WHOLE)

    torch.testing.assert_close(grad(after)(task.init())["bias"], numeric(after, task.init(), "bias"), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("form", ["walked", "padded"])
def test_the_step_size_is_differentiated_too(module, form):
    """Before: zero in silence on padded rows, and torch's error on a linear model."""
    task = Task.from_module(seeded(MODULES[module]))
    data = batches(X, Y, STEPS) if form == "walked" else padded()

    def after(rate):
        return task.risk(descend(task.risk, task.init(), data, SGD(lr=rate["lr"])), WHOLE)

    rate = {"lr": torch.tensor(0.3, dtype=torch.float64)}
    torch.testing.assert_close(grad(after)(rate)["lr"], numeric(after, rate, "lr"), rtol=1e-5, atol=1e-7)


def test_a_gradient_in_closed_form_is_differentiated_too():
    task = Task.from_module(seeded(MODULES["linear"]))

    def length(start):
        return tree.dot(*[gradient_on(task.risk, start, WHOLE)] * 2)

    torch.testing.assert_close(grad(length)(task.init())["weight"], numeric(length, task.init(), "weight"), rtol=1e-5, atol=1e-7)


def test_clients_under_vmap_inside_a_derivative():
    task = Task.from_module(seeded(MODULES["linear"]))
    params, data = task.init(), padded()
    two = tree.map(lambda t: torch.stack([t, t]), data)

    def after(start):
        ends = vmap(lambda mine: descend(task.risk, start, mine, SGD(lr=0.3)))(two)
        return task.risk(tree.map(lambda leaf: leaf.mean(0), ends), WHOLE)

    torch.testing.assert_close(grad(after)(params)["weight"], numeric(after, params, "weight"), rtol=1e-5, atol=1e-7)


def test_a_private_descent_says_that_it_cannot_be_differentiated_through():
    task = Task.from_module(seeded(MODULES["linear"]))
    opt = Private(clip=1.0, noise=1.0, seed=0).using(0.1, None)
    with pytest.raises(InvalidArgument, match="cannot be differentiated through"):
        grad(lambda p: tree.dot(p, descend(task.risk, p, batches(X, Y, STEPS), opt)))(task.init())


@dataclass(frozen=True, kw_only=True)
class Maml(ft.Algorithm):
    """Clients send the exact meta-gradient: that of the risk after their own steps (Finn et al. 2017, equation 1)."""

    def init_server(self, task):
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        whole = {name: data[name][0] for name in ("x", "y", "mask", "key")}

        def after(start):
            return task.risk(descend(task.risk, start, data, self.optimizer(rnd)), whole)

        return {"slope": grad(after)(shared["model"])}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.map(lambda w, g: w - 0.5 * g, shared["model"], upload["slope"])}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)


@pytest.mark.parametrize("module", MODULES)
def test_a_bilevel_method_gives_the_same_numbers_on_both_engines(module):
    data = federation((7, 5, 9, 6)).to(torch.float64)
    task = build_task(seeded(MODULES[module]), data, 0, torch.float64, True)
    method = Maml(lr=0.3, steps=3)
    plan = make_plan(method, task, data, 4, 0, "uniform")
    shared, _ = method.init_server(task)
    ids = torch.arange(4).numpy()
    slopes = [
        engine.round(shared, ids, plan.round(0, 1, ids), Store(4))["slope"]
        for engine in (LoopEngine(plan, workers=1), VectorizedEngine(plan))
    ]
    assert max(float(leaf.abs().max()) for leaf in slopes[0].values()) > 1e-3
    for name in slopes[0]:
        torch.testing.assert_close(slopes[1][name], slopes[0][name], rtol=1e-9, atol=1e-11)


@dataclass(frozen=True, kw_only=True)
class ByTheTape(Maml):
    """The same derivative by ``requires_grad`` and ``torch.autograd.grad``, which ``vmap`` cannot take."""

    def client_update(self, task, shared, personal, data, rnd):
        start = tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), shared["model"])
        end = descend(task.risk, start, data, self.optimizer(rnd))
        slopes = torch.autograd.grad(
            task.risk(end, {name: data[name][0] for name in ("x", "y", "mask", "key")}), list(start.values())
        )
        return {"slope": dict(zip(start, slopes, strict=True))}, personal


def test_what_vmap_cannot_differentiate_takes_the_loop_engine_or_says_so():
    data, how = federation((9, 9)), {"rounds": 1, "workers": 1}
    assert ft.run(ByTheTape(), data, seeded(MODULES["linear"]), **how).summary["engine"] == "loop"
    with pytest.raises(InvalidArgument, match=r"cannot be vectorized .*use engine='loop'"):
        ft.run(ByTheTape(), data, seeded(MODULES["linear"]), engine="vectorized", **how)
