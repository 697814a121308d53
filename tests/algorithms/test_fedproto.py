"""FedProto: prototypes are means weighed by rows, their pull in closed form, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.errors import InvalidArgument

OPTIONS = {"dtype": "float64", "evaluate_every": 0, "batch_size": None, "workers": 1}
SIZES, CLASSES = (5, 8, 6), 4


def clients():
    draw = np.random.default_rng(6)
    labels = [draw.integers(0, 3, n) for n in SIZES]  # nobody has class 3
    return [(draw.normal(size=(len(y), 3)), y) for y in labels]


def federation():
    test = [(np.zeros((1, 3)), np.array([CLASSES - 1]))] * len(SIZES)
    return ft.Federation.from_arrays(clients(), test)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, CLASSES))


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_prototypes_are_the_means_of_all_rows_features_by_class(engine):
    """On a linear model features are the rows, whatever was learned."""
    run = ft.run(ft.FedProto(steps=1), federation(), "linear", rounds=2, engine=engine, **OPTIONS)
    x, y = (np.concatenate(part) for part in zip(*clients(), strict=True))
    want = np.stack([x[y == c].mean(0) if c < 3 else np.zeros(3) for c in range(CLASSES)])
    np.testing.assert_allclose(run.shared["prototypes"], want, atol=1e-12)
    assert run.shared["known"].tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_the_pull_towards_prototypes_in_closed_form(engine):
    """Features A x: the second round's step differs from Local's by -lr lam 2 mean (A x - C_y) x'."""
    lr, lam, net = 0.2, 0.7, network()
    first, both = (
        ft.run(ft.FedProto(lr=lr, lam=lam, steps=1), federation(), net, rounds=r, engine=engine, **OPTIONS) for r in (1, 2)
    )
    local = ft.run(ft.Local(lr=lr, steps=1), federation(), net, rounds=2, engine=engine, **OPTIONS)
    prototypes = first.shared["prototypes"].numpy()
    for i, (x, y) in enumerate(clients()):
        a = first.personal[i]["model"]["0.weight"].numpy()
        pull = 2 * (x @ a.T - prototypes[y]).T @ x / len(y)
        found = both.personal[i]["model"]["0.weight"] - local.personal[i]["model"]["0.weight"]
        np.testing.assert_allclose(found, -lr * lam * pull, atol=1e-12)


def test_a_class_that_the_cohort_lacks_keeps_its_prototype():
    method, task = ft.FedProto(), ft.run(ft.FedProto(), federation(), "linear", rounds=1).task
    shared, server = method.init_server(task)
    old = {"prototypes": torch.arange(12.0).view(4, 3), "known": torch.tensor([1.0, 1, 0, 0])}
    upload = {"sums": torch.full((4, 3), 6.0) * torch.tensor([0.0, 1, 1, 0])[:, None], "counts": torch.tensor([0.0, 2, 3, 0])}
    new, _ = method.server_update(task, old, server, upload, None)
    assert new["prototypes"].tolist() == [[0, 1, 2], [3, 3, 3], [2, 2, 2], [9, 10, 11]]
    assert new["known"].tolist() == [1, 1, 1, 0]
    assert shared["prototypes"].shape == (4, 3)


def test_it_refuses_privacy_and_regression():
    with pytest.raises(InvalidArgument, match="means of the features"):
        ft.run(ft.FedProto(opt=ft.Private()), federation(), "linear", rounds=1)
    rows = [(np.ones((4, 2)), np.arange(4.0))] * 2
    with pytest.raises(InvalidArgument, match="FedProto needs a classifier"):
        ft.run(ft.FedProto(), ft.Federation.from_arrays(rows, rows, task="regression"), "linear", rounds=1)
