"""Hessian-vector products against the explicit Hessians, and conjugate gradients against a direct solution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

import fedtailor as ft
from fedtailor import tree
from fedtailor.data import Batches
from fedtailor.engine.setup import build_task, make_plan
from fedtailor.local import conjugate_gradient, hvp, hvp_on
from tests.make import normal, pairs

SIZES = (7, 4, 9)


def plan_of(kind, model="linear", batch_size=4):
    draw = pairs(SIZES, 3, kind, classes=3)
    fed = ft.Federation.from_arrays(draw, draw, task=kind).to(torch.float64)
    task = build_task(model, fed, 0, torch.float64, bias=True)
    return make_plan(ft.FedAvg(epochs=1), task, fed, batch_size, 0, "uniform"), draw


def hessian(kind, x, weights):
    """By hand, over (weights, bias) as (outputs, features + 1): softmax gives the mean of (diag p - p p') (x) z z', squares that
    of z z' up to a factor."""
    z = np.hstack([x, np.ones((len(x), 1))])
    if kind == "regression":
        return z.T @ z / len(x)
    logits = z @ weights.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    bend = np.einsum("ni,ij->nij", p, np.eye(p.shape[1])) - p[:, :, None] * p[:, None, :]
    return np.einsum("nij,nk,nl->ikjl", bend, z, z).reshape(p.shape[1] * z.shape[1], -1) / len(x)


def flat(model):
    """(outputs, features + 1), row by row."""
    return torch.cat([model["weight"], model["bias"][..., None]], -1).flatten().numpy()


def points(task):
    start = task.init()
    return [{name: normal(*leaf.shape, seed=seed) for name, leaf in start.items()} for seed in (1, 2)]


def factor(task):
    """Of the task's squared error: the second derivative of the loss in the prediction."""
    zero = {name: leaf * 0 for name, leaf in task.init().items()}
    rows = {"x": torch.zeros(1, 3, dtype=torch.float64), "y": torch.zeros(1, dtype=torch.float64)}
    return 2 * float(task.risk({**zero, "bias": zero["bias"] + 1}, rows))  # risk c/2 at a distance of one


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_the_product_is_that_of_the_explicit_hessian_on_both_engines(kind):
    plan, draw = plan_of(kind)
    task, (at, along) = plan.task, points(plan.task)
    scale = factor(task) if kind == "regression" else 1.0
    weights = flat(at).reshape(-1, 4)
    wanted = [scale * hessian(kind, x, weights) @ flat(along) for x, _ in draw]
    for client, expected in enumerate(wanted):
        assert np.allclose(flat(hvp(task.risk, at, plan.feed.one(client, 0), along)), expected, rtol=1e-12, atol=1e-13)
    data = plan.feed.many(np.arange(3), 0)
    stacked = vmap(lambda mine: hvp(task.risk, at, mine, along), in_dims=1)(data)
    for client, expected in enumerate(wanted):
        assert np.allclose(flat(tree.map(lambda leaf, i=client: leaf[i], stacked)), expected, rtol=1e-12, atol=1e-13)


def test_a_network_by_differences_of_its_gradient_and_buffers_stay_out():
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    plan, _ = plan_of("classification", network)
    task, batch = plan.task, next(plan.feed.one(2, 0).batches())
    at = tree.map(lambda leaf: leaf.double(), task.init())
    along = {name: normal(*leaf.shape, seed=3) for name, leaf in at.items()}
    product = hvp_on(task.risk, at, batch, along)
    names = [name for name in at if not name.startswith("buffer:")]

    def slope(shift):
        moved = {name: (at[name] + shift * along[name] if name in names else at[name]).requires_grad_() for name in at}
        return torch.autograd.grad(task.risk(moved, batch), [moved[name] for name in names])

    for name, up, down in zip(names, slope(1e-5), slope(-1e-5), strict=True):
        assert torch.allclose(product[name], (up - down) / 2e-5, rtol=1e-6, atol=1e-8)
    assert all(not product[name].any() for name in at if name not in names)


def test_conjugate_gradients_solve_and_stay_when_done():
    root = normal(5, 5, seed=4)
    matrix, b = root @ root.T + torch.eye(5), normal(5, seed=5)
    tall = {"a": b[:2], "b": b[2:]}

    def product(v):
        out = matrix @ torch.cat([v["a"], v["b"]])
        return {"a": out[:2], "b": out[2:]}

    for steps in (5, 40):
        x = conjugate_gradient(product, tall, steps)
        assert torch.allclose(torch.cat([x["a"], x["b"]]), torch.linalg.solve(matrix, b), rtol=1e-8)
    two = conjugate_gradient(product, tall, 2)
    space = torch.linalg.qr(torch.stack([b, matrix @ b], 1))[0]  # the best in the Krylov space, in the matrix's norm
    best = space @ torch.linalg.solve(space.T @ matrix @ space, space.T @ b)
    assert torch.allclose(torch.cat([two["a"], two["b"]]), best, rtol=1e-8)
    nothing = conjugate_gradient(product, tree.zeros(tall), 3)
    assert not torch.cat([nothing["a"], nothing["b"]]).any()


def test_newton_steps_reach_least_squares_on_both_engines():
    plan, draw = plan_of("regression", batch_size=None)
    task, start = plan.task, plan.task.init()

    def newton(data):
        slope = ft.local.gradient(task.risk, start, data)
        return tree.sub(start, conjugate_gradient(lambda v: hvp(task.risk, start, data, v), slope, 8))

    stacked = vmap(newton, in_dims=1)(plan.feed.many(np.arange(3), 0))
    for client, (x, y) in enumerate(draw):
        z = np.hstack([x, np.ones((len(x), 1))])
        if len(x) <= 4:
            continue  # no unique minimiser to speak of
        best = np.linalg.lstsq(z, y, rcond=None)[0]
        assert np.allclose(flat(newton(plan.feed.one(client, 0))), best, rtol=1e-8)
        assert np.allclose(flat(tree.map(lambda leaf, i=client: leaf[i], stacked)), best, rtol=1e-8)


def test_batches_with_labels_per_position_are_weighed_by_their_positions():
    """Three real positions against one: the Hessian on all positions is not the mean of those of the two batches."""
    task = ft.Task.from_module(nn.Linear(3, 2).double())
    task = ft.Task(**{**vars(task), "apply": lambda m, x: x @ m["weight"].T + m["bias"], "forward": None, "gradient": None})
    x, y = normal(2, 3, 3, seed=2), torch.tensor([[0, 1, 1], [0, -1, -1]])
    start, along = task.init(), {name: torch.ones_like(leaf) for name, leaf in task.init().items()}
    along["weight"][0] = 0.3
    rows = Batches(x, y, np.array([[0], [1]]), np.arange(2))
    whole = hvp_on(task.risk, start, {"x": x, "y": y}, along)
    for name, leaf in hvp(task.risk, start, rows, along).items():
        torch.testing.assert_close(leaf, whole[name], rtol=1e-12, atol=1e-12)
