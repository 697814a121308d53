"""Teachers' answers and a student's steps: the same numbers on one core and on two."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
from torch import nn

from fedtailor.engine.base import one_thread
from fedtailor.models.resnet import resnet
from fedtailor.server import at_once, distill
from fedtailor.task import Task


@pytest.fixture(autouse=True)
def single():
    """As in a run, every thread computes alone."""
    with one_thread():
        yield


@pytest.fixture
def task() -> Task:
    torch.manual_seed(0)
    return Task.from_module(resnet(8, 4, adapters=True))


def on_cores(monkeypatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: set(range(count)), raising=False)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def taught(task: Task) -> dict[str, torch.Tensor]:
    x = rows(64)
    target = torch.softmax(torch.randn(64, 4, generator=torch.Generator().manual_seed(2)), -1)
    index = np.random.default_rng(0).integers(64, size=(3, 40))
    return distill.distill(task, task.init(), x, target, index, lr=0.01)


def test_answers_and_steps_do_not_depend_on_the_number_of_cores(task, monkeypatch):
    found = []
    for cores in (1, 2, 3):
        on_cores(monkeypatch, cores)
        found.append({"answers": distill.outputs(task, task.init(), rows(300)), **taught(task)})
    for other in found[1:]:
        assert all(torch.equal(other[name], leaf) for name, leaf in found[0].items())


def test_answers_are_those_of_a_pass_over_each_part(task, monkeypatch):
    on_cores(monkeypatch, 2)
    with torch.no_grad():
        parts = [distill.in_fast_layout(task, part) for part in rows(300).split(distill.CHUNK)]
        one = torch.cat([task.apply(task.init(), part) for part in parts])
    assert torch.equal(distill.outputs(task, task.init(), rows(300)), one)


def test_the_gradient_of_a_lesson_is_that_of_the_mean_gap_over_all_rows(task, monkeypatch):
    on_cores(monkeypatch, 2)
    monkeypatch.setattr(at_once, "SMALL", 0)
    net = Task.from_module(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)).double())
    x, model = rows(33).double(), net.init()
    target = torch.softmax(torch.randn(33, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), -1)
    got = distill._lesson(net, list(model), 2.0, model, {"x": x, "y": target})
    free = {name: leaf.requires_grad_() for name, leaf in net.init().items()}
    gap = net.kind.gap(net.apply(free, x), target, 2.0).mean()
    for name, leaf in zip(free, torch.autograd.grad(gap, list(free.values())), strict=True):
        torch.testing.assert_close(got[name], leaf, rtol=1e-10, atol=1e-12)


def test_jobs_run_in_as_many_threads_as_there_are_cores_each_with_a_module_of_its_own(task, monkeypatch):
    on_cores(monkeypatch, 2)
    meet = threading.Barrier(2, timeout=30)

    def job(apply):
        meet.wait()
        return id(apply.__self__.evaluator)

    assert len(set(at_once.at_once(task, [job, job], rows(1)))) == 2


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(200, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.rand(())


def test_a_module_that_draws_at_random_is_asked_in_order(monkeypatch):
    on_cores(monkeypatch, 2)
    here = at_once.at_once(Task.from_module(Draws()), [lambda apply: threading.get_ident()] * 3, torch.zeros(1, 200))
    assert set(here) == {threading.get_ident()}
