"""Linear layers with ReLU: the gradient of many clients at once by the layers' rules is automatic differentiation's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import grad

import fedtailor as ft
from fedtailor.local import SGD, descend, prox
from fedtailor.task import Task

CLIENTS, ROWS, WIDTH, OUTPUTS = 3, 5, 4, 3
NETWORKS = {
    "flattened": lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, OUTPUTS)),
    "three layers, no bias": lambda: nn.Sequential(
        nn.Linear(WIDTH, 6, bias=False), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, OUTPUTS, bias=False)
    ),
}


def task(name: str = "flattened", loss: str = "cross_entropy") -> Task:
    torch.manual_seed(0)
    return Task.from_module(NETWORKS[name]().double(), loss)


def stacked(task: Task, loss: str = "cross_entropy") -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Models and batches of some clients."""
    draw = torch.Generator().manual_seed(1)
    models = {k: torch.randn(CLIENTS, *v.shape, dtype=v.dtype, generator=draw) for k, v in task.init().items()}
    x = torch.randn(CLIENTS, ROWS, WIDTH, dtype=torch.float64, generator=draw)
    shape = (CLIENTS, ROWS) if loss == "cross_entropy" else (CLIENTS, ROWS, OUTPUTS)
    y = torch.randint(OUTPUTS if loss == "cross_entropy" else 2, shape, generator=draw)
    return models, {"x": x, "y": y if loss == "cross_entropy" else y.double()}


@pytest.mark.parametrize("rows", [9, 16, 17])
def test_a_clients_gradient_has_the_same_bits_alone_and_beside_a_longer_client(rows):
    """Beside one with more rows it is padded and masked; the padding adds zeros, and its rows are averaged alike."""
    learner = Task.from_module(NETWORKS["flattened"]())
    draw = torch.Generator().manual_seed(2)
    models = {k: torch.randn(2, *v.shape, generator=draw) for k, v in learner.init().items()}
    x, y = torch.randn(2, rows, WIDTH, generator=draw), torch.randint(OUTPUTS, (2, rows), generator=draw)
    shorter = torch.ones(2, rows)
    shorter[0, -1] = 0
    both = learner.layered.gradient(models, {"x": x, "y": y, "mask": shorter})
    alone = learner.layered.gradient({k: v[1:] for k, v in models.items()}, {"x": x[1:], "y": y[1:]})
    assert all(torch.equal(both[k][1:], alone[k]) for k in alone)


@pytest.mark.parametrize("more", ["all rows", "mask", "weight"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_is_automatic_differentiations(name, loss, more):
    t = task(name, loss)
    models, batch = stacked(t, loss)
    if more != "all rows":
        batch[more] = (
            torch.tensor([[1.0, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 2, 0]]).double().clamp(max=1 + (more == "weight"))
        )
    assert t.layered is not None
    got = t.layered.gradient(models, batch)
    for i in range(CLIENTS):
        one = grad(t.risk)({k: v[i] for k, v in models.items()}, {k: v[i] for k, v in batch.items()})
        for key, leaf in one.items():
            torch.testing.assert_close(got[key][i], leaf, rtol=1e-12, atol=1e-14)


def test_a_pulled_descent_of_both_engines_ends_at_the_same_place():
    """By the layers' rules on stacked tensors, and by autograd for one client after another."""
    draw = torch.Generator().manual_seed(2)
    rows = [(torch.randn(7 + i, WIDTH, generator=draw), torch.randint(OUTPUTS, (7 + i,), generator=draw)) for i in range(CLIENTS)]
    fed = ft.Federation.from_arrays(rows, rows)
    settings = {"rounds": 3, "batch_size": 4, "dtype": "float64", "seed": 1}
    runs = [ft.run(ft.Ditto(lr=0.1, epochs=2), fed, "mlp:6", engine=engine, **settings) for engine in ("loop", "vectorized")]
    for client in range(CLIENTS):
        one, other = (run.predict(client, rows[client][0]) for run in runs)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_what_a_descent_returns_is_contiguous():
    t = task()
    models, batch = stacked(t)
    data = {
        **{k: v.unsqueeze(1).expand(-1, 2, *v.shape[1:]) for k, v in batch.items()},
        "mask": torch.ones(CLIENTS, 2, ROWS, dtype=torch.float64),
        "key": torch.zeros(CLIENTS, 2, dtype=torch.int64),
    }
    end = torch.func.vmap(lambda own, mine: descend(t.risk, own, mine, SGD(lr=0.1), prox(t.init(), 0.5)))(models, data)
    assert all(leaf.is_contiguous() for leaf in end.values())


OTHERS = {
    "a linear model": nn.Linear(WIDTH, OUTPUTS),
    "another activation": nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, OUTPUTS)),
    "a norm": nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, OUTPUTS)),
    "ReLU at the end": nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, OUTPUTS), nn.ReLU()),
    "part of the rows flattened": nn.Sequential(nn.Flatten(2), nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, OUTPUTS)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_differentiated_automatically(name):
    assert Task.from_module(OTHERS[name]).layered is None


def test_frozen_and_hooked_layers_are_differentiated_automatically():
    frozen, hooked = (NETWORKS["flattened"]() for _ in range(2))
    frozen[1].weight.requires_grad_(False)
    hooked[1].register_forward_hook(lambda layer, given, out: 2 * out)
    assert Task.from_module(frozen).layered is None
    assert Task.from_module(hooked).layered is None


def test_the_rules_go_with_the_functions_that_they_were_derived_for():
    t = task()
    assert replace(t, notes=("told",)).layered is not None
    assert replace(t, example_loss=lambda logits, y: logits.square().sum(-1)).layered is None
    assert replace(t, forward=lambda model, batch: (batch["x"], {})).layered is None


def test_labels_for_every_position_are_not_taken():
    t = task("three layers, no bias")
    assert t.layered is not None
    x, y = torch.zeros(CLIENTS, ROWS, 2, WIDTH), torch.zeros(CLIENTS, ROWS, 2, dtype=torch.int64)
    assert not t.layered.takes({"x": x, "y": y})
    assert t.layered.takes({"x": x[:, :, 0], "y": y[:, :, 0]})
