"""Kinds are the strings that users write, and everything that depends on the kind is asked of them."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.errors import InvalidArgument
from fedtailor.task.kinds import CLASSIFICATION, KINDS, REGRESSION, Kind, kind_of
from fedtailor.task.scores import Metric
from tests.make import federation


@pytest.mark.parametrize("name", ["classification", "regression", "multilabel"])
def test_a_kind_is_its_name_and_stays_one_object(name):
    kind = kind_of(name)
    assert kind == name
    assert json.dumps({"kind": kind}) == f'{{"kind": "{name}"}}'
    assert type(str(kind)) is str
    assert kind_of(kind) is pickle.loads(pickle.dumps(kind)) is copy.deepcopy(kind) is kind


def test_names_become_kinds_wherever_users_write_them():
    fed = federation([5, 6], kind="regression")
    assert fed.kind is REGRESSION
    assert ft.Federation(fed.train, fed.test, names=fed.names, kind="regression").kind is REGRESSION
    task = ft.Task(lambda model, x: x, lambda logits, y: logits, dict, kind="regression")
    assert task.kind is REGRESSION
    assert federation([5, 6]).kind is federation([5, 6]).as_task("classification").kind is CLASSIFICATION


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(InvalidArgument, match="unknown task 'ranking'; use one of classification, regression, multilabel"):
        federation([5, 6]).as_task("ranking")


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_gap_to_the_targets_has_the_gradient_of_the_prediction_minus_the_target(kind):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, generator=draw, dtype=torch.float64).requires_grad_()
    target = torch.softmax(torch.randn(5, 3, generator=draw, dtype=torch.float64), -1)
    kind.gap(logits, target).sum().backward()
    torch.testing.assert_close(logits.grad, (kind.soft(logits) - target).detach())


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_curvature_and_slope_bound_the_derivatives_of_the_loss(kind):
    draw, outputs = torch.Generator().manual_seed(0), 4
    y = {"classification": torch.tensor([1]), "multilabel": torch.ones(1, outputs)}.get(kind, torch.zeros(1, outputs))
    reached = 0.0
    for size in (0.0, 1.0, 8.0):
        logits = size * torch.randn(1, outputs, generator=draw, dtype=torch.float64)
        if size == 8.0 and kind.softmax:  # two classes level and far above the others: the bound is reached
            logits = torch.tensor([[20.0, 20.0, -20.0, -20.0]], dtype=torch.float64)
        bend = torch.autograd.functional.hessian(lambda z: kind.example_loss(z, y)[0], logits)[0, :, 0]
        steepest = float(torch.linalg.eigvalsh(bend)[-1]) * kind.averaged(outputs)
        slope = torch.func.grad(lambda z: kind.example_loss(z, y)[0])(logits)
        assert steepest <= kind.curvature * (1 + 1e-12)
        assert float(slope.square().sum()) <= kind.slope2 / kind.averaged(outputs)
        torch.testing.assert_close(kind.residual(logits.clone(), y), slope)
        reached = max(reached, steepest)
    assert reached == pytest.approx(kind.curvature)


def test_merit_and_gain_are_higher_where_better():
    accuracy, error = CLASSIFICATION.score, REGRESSION.score
    assert (accuracy.gain(0.9, 0.7) > 0, error.gain(0.9, 0.7) > 0) == (True, False)
    assert (accuracy.merit(0.9), error.merit(0.9), error.merit(error.merit(0.9))) == (0.9, -0.9, 0.9)
    assert (accuracy.with_article, error.with_article) == ("an accuracy", "a mean squared error")


def test_another_metric_of_a_kind_is_measured_and_summarised(monkeypatch):
    def worst(logits, y, real):
        errors = (logits.squeeze(-1) - y).abs().double()
        return torch.where(real, errors, -1.0).amax(1).numpy()

    largest = Metric("largest", "largest error", "largest error", higher=False, share=False, clients=worst)
    monkeypatch.setattr(type(REGRESSION), "metrics", (*REGRESSION.metrics, largest))
    fed = federation([5, 6], kind="regression")
    run = ft.run(ft.FedAvg(lr=0.1), fed, rounds=1)
    want = [np.abs(run.predict(i, fed.test.client(i)[0]).numpy() - fed.test.client(i)[1].numpy()).max() for i in range(2)]
    np.testing.assert_allclose(run.clients["largest_personal"], want, rtol=1e-6)
    assert run.summary["largest_personal"] == pytest.approx(np.mean(want), rel=1e-6)
    assert "largest_personal" not in ft.run(ft.FedAvg(lr=0.1), federation([5, 6]), rounds=1).clients
    assert isinstance(fed.kind, Kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_of_classes_is_torchs_cross_entropy_bit_for_bit_also_under_vmap(dtype):
    draw = torch.Generator().manual_seed(0)
    z, y = 4 * torch.randn(7, 33, 5, generator=draw, dtype=dtype), torch.randint(5, (7, 33), generator=draw)

    def torchs(logits, labels):
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    def slopes(loss):
        return torch.func.vmap(torch.func.grad(lambda logits, labels: loss(logits, labels).mean()))(z, y)

    assert torch.equal(CLASSIFICATION.example_loss(z[0], y[0]), torchs(z[0], y[0]))
    assert torch.equal(slopes(CLASSIFICATION.example_loss), slopes(torchs))
