"""pFedHN: its update is the chain rule, what newcomers receive, and that it tells clients apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.engine.setup import build_task
from fedtailor.errors import InvalidArgument
from tests.make import pairs

OPTIONS = {"dtype": "float64", "evaluate_every": 0, "batch_size": None, "workers": 1}


def federation(count=3):
    clients = pairs([8] * count, d=2)
    return ft.Federation.from_arrays(clients, clients)


class Known:
    """What the server reads of a round."""

    weights, ranks = torch.tensor([0.25, 0.75]).double(), torch.tensor([2, 0])


def test_the_server_follows_the_chain_rule():
    """Against finite differences of <theta_i, delta_i>: weighed in the network, whole in the embeddings."""
    method = ft.PFedHN(hidden=3, layers=2, embedding=2, hyper_lr=0.5, embedding_lr=0.25)
    task = build_task("linear", federation(), 0, torch.float64, bias=True)
    shared, server = method.init_server(task)
    draw = torch.Generator().manual_seed(3)
    delta = {name: torch.randn((2, *leaf.shape), generator=draw).double() for name, leaf in task.init().items()}
    _, after = method.server_update(task, shared, server, {"delta": delta}, Known())

    def inner(net, embeddings, weights):
        made = method.made(net, embeddings[Known.ranks])
        return sum((weights @ (made[name] * delta[name]).flatten(1).sum(1)) for name in made)

    step = 1e-6
    for name, leaf in server["net"].items():
        want = torch.zeros_like(leaf)
        for at in np.ndindex(leaf.shape):
            up, down = leaf.clone(), leaf.clone()
            up[at] += step
            down[at] -= step
            ends = [inner({**server["net"], name: end}, server["embeddings"], Known.weights) for end in (up, down)]
            want[at] = (ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close(after["net"][name] - leaf, 0.5 * want, atol=1e-7, rtol=1e-6)
    moved = after["embeddings"] - server["embeddings"]
    v = server["embeddings"].clone().requires_grad_()
    (want,) = torch.autograd.grad(inner(server["net"], v, torch.ones(2).double()), v)
    torch.testing.assert_close(moved, 0.25 * want)
    assert not moved[1].any()  # not in the cohort


def test_a_newcomer_receives_the_model_of_the_mean_embedding():
    method = ft.PFedHN(hidden=3, layers=1)
    task = build_task("linear", federation(), 0, torch.float64, bias=True)
    shared, server = method.init_server(task)
    one = method.downlink(task, shared, server, None, None)["model"]
    middle = {**server, "embeddings": server["embeddings"].mean(0, keepdim=True)}
    there = method.downlink(task, shared, middle, torch.tensor([0]), None)["model"]
    for a, b in zip(tree.leaves(one), tree.leaves(there), strict=True):
        torch.testing.assert_close(a, b[0])
    assert server["embeddings"].shape == (3, 1)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_clients_with_opposite_labels_receive_different_models(engine):
    x = np.random.default_rng(0).normal(size=(40, 2))
    clients = [(x, (sign * x[:, 0] > 0).astype(int)) for sign in (1, -1)]
    fed = ft.Federation.from_arrays(clients, clients)
    method = ft.PFedHN(lr=0.5, steps=5, hidden=8, layers=1, embedding=2, hyper_lr=0.1)
    run = ft.run(method, fed, "linear", rounds=80, engine=engine, **{**OPTIONS, "evaluate_every": 80})
    assert run.summary["acc_personal"] > 0.9
    alone = ft.run(ft.FedAvg(lr=0.5, steps=5), fed, "linear", rounds=80, **{**OPTIONS, "evaluate_every": 80})
    assert alone.summary["acc_personal"] < 0.6


def test_it_needs_to_know_how_many_clients_there_are():
    task = build_task("linear", federation(), 0, torch.float64, bias=True)
    with pytest.raises(InvalidArgument, match="number is not known"):
        ft.PFedHN().init_server(replace(task, clients=0))
