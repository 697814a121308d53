"""FedPAC: its statistics in closed form, whose heads are mixed, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.algorithms.fedpac import mixtures
from fedtailor.engine.setup import build_task
from fedtailor.errors import InvalidArgument
from tests.make import batches

OPTIONS = {"dtype": "float64", "evaluate_every": 0, "batch_size": None, "workers": 1}


def rows(seed, sign=1.0, n=12):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 3))
    return x, (sign * x[:, 0] > 0).astype(int)


def federation(signs=(1, 1, -1, -1)):
    clients = [rows(i, sign) for i, sign in enumerate(signs)]
    return ft.Federation.from_arrays(clients, clients)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_statistics_are_those_of_the_labelled_features():
    """h is the mean of the matrices e_y f', v their variance over rows divided by the number of rows."""
    x, y = rows(0)
    task = build_task(network(), federation(), 0, torch.float64, bias=True)
    data = batches(torch.tensor(x), torch.tensor(y), [range(0, 6), range(6, 12)])
    found = ft.FedPAC().statistics(task, task.init(), data)
    f = task.features(task.init(), torch.tensor(x)).numpy()
    each = np.eye(2)[y][:, :, None] * f[:, None, :]
    np.testing.assert_allclose(found["h"], each.mean(0), atol=1e-12)
    np.testing.assert_allclose(found["v"], each.var(0).sum() / len(y), atol=1e-12)


def test_heads_of_clients_that_are_alike_are_mixed_and_others_are_not():
    v, h = np.full(4, 0.1), np.array([[0.0], [0.0], [9.0], [9.0]])
    a = mixtures(v, h)
    np.testing.assert_allclose(a[:2, :2], 0.5, atol=1e-3)
    np.testing.assert_allclose(a[:2, 2:], 0, atol=1e-3)
    np.testing.assert_allclose(a.sum(1), 1)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_round_mixes_heads_and_averages_the_body(engine):
    """Labels turned round in half of the clients: the head of each half is of that half."""
    fed = federation()
    mixed, apart = (
        ft.run(ft.FedPAC(steps=2, combine=c), fed, network(), rounds=1, weights="uniform", engine=engine, **OPTIONS)
        for c in (True, False)
    )
    task, x = mixed.task, fed.test.client(0)[0].double()
    features = task.features({**task.init(), **mixed.shared["model"]}, x).numpy()
    logits = [[run.predict(i, fed.test.client(0)[0]).double().numpy() for i in range(4)] for run in (mixed, apart)]
    for i in range(4):  # logits are linear in the head: those of the mixture are a mixture of those of single heads
        share, left, *_ = np.linalg.lstsq(np.stack([z.ravel() for z in logits[1]], 1), logits[0][i].ravel(), rcond=None)
        assert share.sum() == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(left, 0, atol=1e-9)
    assert features.shape == (12, 4)
    for name, leaf in mixed.shared["model"].items():
        torch.testing.assert_close(leaf, apart.shared["model"][name])  # heads were mixed after the body had been trained


def test_it_refuses_privacy_regression_and_a_model_that_is_only_a_head():
    fed = federation()
    with pytest.raises(InvalidArgument, match="means and variances of the features"):
        ft.run(ft.FedPAC(opt=ft.Private()), fed, network(), rounds=1)
    with pytest.raises(InvalidArgument, match="leaves no shared parameters"):
        ft.run(ft.FedPAC(), fed, "linear", rounds=1)
    task = build_task(network(), fed, 0, torch.float64, bias=True)
    with pytest.raises(InvalidArgument, match="number is not known"):
        ft.FedPAC().init_server(replace(task, clients=0))
