"""Fed-RoD: its first step in closed form, what the balanced loss does, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.errors import InvalidArgument
from tests.make import pairs

OPTIONS = {"dtype": "float64", "evaluate_every": 0, "rounds": 1, "batch_size": None, "workers": 1}


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def federation(labels=(0, 0, 0, 1, 1, 2)):
    x = np.random.default_rng(4).normal(size=(len(labels), 3))
    return ft.Federation.from_arrays([(x, np.array(labels))] * 2, [(x, np.arange(len(labels)) % 3)] * 2)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_the_first_step_of_both_heads_in_closed_form(engine):
    """From a linear model at zero: the generic one learns against the class prior, the personal one against even odds."""
    fed = federation()
    run = ft.run(ft.FedROD(lr=0.5, steps=1), fed, "linear", engine=engine, **OPTIONS)
    x, y = (np.asarray(part) for part in fed.train.client(0))
    hot, prior = np.eye(3)[y], np.log(np.bincount(y))
    start = np.zeros((len(y), 3))
    generic = -0.5 * (softmax(start + prior) - hot).T @ x / len(y)
    personal = -0.5 * (softmax(start) - hot).T @ x / len(y)
    np.testing.assert_allclose(run.shared["model"]["weight"], generic, atol=1e-12)
    np.testing.assert_allclose(run.personal[0]["weight"], personal, atol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_class_that_no_client_has_is_left_alone_by_the_balanced_loss_only(engine):
    fed = federation((0, 0, 0, 1, 1))
    balanced = ft.run(ft.FedROD(lr=0.5, steps=1), fed, "linear", engine=engine, **OPTIONS)
    plain = ft.run(ft.FedROD(lr=0.5, steps=1, balanced=False), fed, "linear", engine=engine, **OPTIONS)
    assert not balanced.shared["model"]["weight"][2].any()
    assert plain.shared["model"]["weight"][2].any()


def test_prediction_is_the_sum_of_both_heads_and_a_newcomer_has_the_generic_one():
    fed = federation()
    run = ft.run(ft.FedROD(steps=3), fed, "mlp:4", **{**OPTIONS, "rounds": 2})
    task, x = run.task, fed.test.client(0)[0].double()
    method, shared = ft.FedROD(steps=3), run.shared
    newcomer = method.init_client(task, shared, None)
    torch.testing.assert_close(method.predict(task, shared, newcomer, x), task.apply(shared["model"], x))
    own = run.personal[0]
    more = method.predict(task, shared, own, x) - task.apply(shared["model"], x)
    torch.testing.assert_close(more, task.features(shared["model"], x) @ own["weight"].T + own["bias"])
    assert more.abs().max() > 0


def test_it_needs_a_classifier_with_a_linear_head():
    clients = pairs((6, 6), kind="regression")
    with pytest.raises(InvalidArgument, match="FedROD needs a classifier that ends in a linear layer"):
        ft.run(ft.FedROD(), ft.Federation.from_arrays(clients, clients, task="regression"), "linear", rounds=1)
    net = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 3, 3), nn.Flatten())
    with pytest.raises(InvalidArgument, match="linear layer"):
        ft.run(ft.FedROD(), federation(), net, rounds=1)


def test_class_counts_are_not_private_and_without_them_it_is():
    private = ft.Private(noise=1.0)
    with pytest.raises(InvalidArgument, match="numbers of rows per class"):
        ft.run(ft.FedROD(opt=private), federation(), "linear", rounds=1)
    run = ft.run(ft.FedROD(opt=private, balanced=False), federation(), "linear", rounds=1)
    assert run.summary["epsilon"] > 0
