"""A function that only hands on ``task.risk`` is taken for it; the meter counts what is trained, by whatever descends."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

import fedtailor as ft
from fedtailor.data.batches import Batches
from fedtailor.local import SGD, Adam, Private, Turn, alternate, descend, gradient, gradient_on, prox, scan
from fedtailor.local.gradients import task_of
from fedtailor.local.meter import Meter, metered
from fedtailor.metrics.cost import probe
from fedtailor.task import Task

STEPS, ROWS = 3, 4


def task(model=None) -> Task:
    torch.manual_seed(0)
    return Task.from_module((model or nn.Linear(3, 2)).double())


def data() -> Batches:
    x = torch.randn(STEPS * ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(STEPS * ROWS) % 2
    return Batches(x, y, np.arange(STEPS * ROWS).reshape(STEPS, ROWS), np.arange(STEPS))


def padded() -> dict[str, torch.Tensor]:
    """Two clients, of which the second has no row in the last step."""
    one = {name: data()[name] for name in ("x", "y", "mask", "key")}
    two = {name: torch.stack([leaf, leaf], 1) for name, leaf in one.items()}
    two["mask"] = two["mask"].clone()
    two["mask"][-1, 1] = 0
    return two


def counting(task: Task) -> list[str]:
    """``task`` notes its closed-form gradients here."""
    calls: list[str] = []
    formula = task.gradient
    object.__setattr__(task, "gradient", lambda model, batch: (calls.append("closed"), formula(model, batch))[1])
    return calls


WRAPPED = {
    "itself": lambda t: t.risk,
    "lambda": lambda t: lambda p, b: t.risk(p, b),
    "by its class": lambda t: lambda p, b: Task.risk(t, p, b),
    "named arguments": lambda t: lambda p, b: t.risk(model=p, batch=b),
}
MORE = {
    "a term more": lambda t: lambda p, b: t.risk(p, b) + p["weight"].square().sum(),
    "twice": lambda t: lambda p, b: t.risk(p, b) + t.risk(p, b),
    "its gradient": lambda t: lambda p, b: torch.autograd.grad(t.risk(p, b), p["weight"], create_graph=True)[0].sum(),
}
OTHER = {
    "another model": lambda t: lambda p, b: t.risk({k: 2 * v for k, v in p.items()}, b),
    "another batch": lambda t: lambda p, b: t.risk(p, {**b, "x": 2 * b["x"]}),
    "nothing of it": lambda t: lambda p, b: p["weight"].sum(),
}


@pytest.mark.parametrize("name", [*WRAPPED, *MORE, *OTHER])
def test_only_a_risk_that_is_handed_on_is_the_tasks_own(name):
    t = task()
    batch = next(data().batches())
    owner, more, _ = task_of({**WRAPPED, **MORE, **OTHER}[name](t), t.init(), lambda: batch)
    assert (owner is t, more) == (name in WRAPPED, name in MORE)


@pytest.mark.parametrize("opt", [SGD(lr=0.1), Adam(lr=0.1), Private(noise=0.5, seed=1).using(0.1, None)])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_risk_stays_on_the_fast_path_of_both_engines(name, opt):
    t = task()
    risk, start = WRAPPED[name](t), t.init()
    walked = descend(t.risk, start, data(), opt, prox(start, 0.3))
    again = descend(risk, start, data(), opt, prox(start, 0.3))
    assert all(torch.equal(again[name], walked[name]) for name in start)
    calls = counting(t)
    stacked = vmap(lambda client: descend(risk, start, client, opt, prox(start, 0.3)), in_dims=1)(padded())
    for got, want in zip(stacked.values(), walked.values(), strict=True):
        torch.testing.assert_close(got[0], want, rtol=1e-12, atol=1e-12)
    assert len(calls) == (0 if opt.privacy else STEPS)  # once a step for all clients, not at all where rows are clipped
    gradient_on(risk, start, next(data().batches()))
    assert len(calls) == (1 if opt.privacy else STEPS + 1)


def test_a_wrapped_risk_of_labels_per_position_weighs_batches_by_positions():
    """Three real positions against one: the mean over all positions is not the mean over the two batches."""
    t = Task.from_module(nn.Linear(3, 2).double())
    t = Task(**{**vars(t), "apply": lambda m, x: x @ m["weight"].T + m["bias"], "forward": None, "gradient": None})
    x = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rows = Batches(x, torch.tensor([[0, 1, 1], [0, -1, -1]]), np.array([[0], [1]]), np.arange(2))
    start = t.init()
    want = gradient(t.risk, start, rows, by_rows=True)
    wrapped = gradient(lambda p, b: t.risk(p, b), start, rows, by_rows=True)
    whole = gradient_on(t.risk, start, {"x": x, "y": torch.tensor([[0, 1, 1], [0, -1, -1]])})
    for name in start:
        torch.testing.assert_close(want[name], whole[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(wrapped[name], whole[name], rtol=1e-12, atol=1e-12)


def test_frozen_parameters_stay_where_clients_end_out_of_order():
    """The first client is done before the second, so that clients are picked by index; what is frozen is not written to."""
    t, wide = task(), padded()
    wide["mask"] = wide["mask"].flip(1)
    start, rates = t.init(), {"bias": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a write to memory that clients share
        stacked = vmap(lambda client: descend(t.risk, start, client, SGD(lr=0.1, momentum=0.9), rates=rates), in_dims=1)(wide)
    want = descend(t.risk, start, data(), SGD(lr=0.1, momentum=0.9), rates=rates)
    torch.testing.assert_close(stacked["weight"][1], want["weight"], rtol=1e-12, atol=1e-12)
    assert torch.equal(stacked["bias"], start["bias"].expand(2, -1))


# -- the meter --------------------------------------------------------------------------------------------------------
def counted(work) -> int:
    meter = Meter()
    with metered(meter):
        work(task())
    return meter.trained


def test_the_meter_counts_parameters_once_however_often_they_are_descended_on():
    opt, rows = SGD(lr=0.1), data()

    def again(t):
        model = t.init()
        for _ in range(5):
            model = descend(t.risk, model, rows, opt)

    def inside_a_scan(t):
        scan(lambda model, batch: descend(t.risk, model, rows, opt), t.init(), rows)

    def one_part_after_the_other(t):
        model = descend(t.risk, t.init(), rows, opt, rates={"weight": 0.0})
        descend(t.risk, model, rows, opt, rates={"bias": 0.0})

    def two_models(t):
        for _ in range(2):
            descend(t.risk, t.init(), rows, opt)

    def from_one_start(t):
        start = t.init()
        for _ in range(2):
            descend(t.risk, start, rows, opt)

    def turns(t):
        risk = lambda p, b: t.risk(p["a"], b) + t.risk(p["b"], b)  # noqa: E731
        params = {"a": t.init(), "b": t.init(), "c": t.init()}
        alternate([Turn("a", risk, opt), Turn("b", risk, opt, {"weight": 0.0})], params, rows)

    assert [counted(work) for work in (again, inside_a_scan, one_part_after_the_other)] == [8, 8, 8]
    assert [counted(work) for work in (two_models, from_one_start, turns)] == [16, 16, 10]


def test_scans_and_gradients_count_where_nothing_descends():
    rows = data()
    assert counted(lambda t: scan(lambda c, b: c, {"w": t.init(), "share": torch.ones(())}, rows)) == 8
    assert counted(lambda t: gradient(t.risk, t.init(), rows)) == 8


class Ridge(ft.FedAvg):
    """FedAvg with a term of its own around the risk."""

    def client_update(self, task, shared, personal, data, rnd):
        def risk(model, batch):
            return task.risk(model, batch) + 0.1 * model["weight"].square().sum()

        return {"delta": descend(risk, shared["model"], data, self.optimizer(rnd))}, personal


def test_a_run_can_say_that_a_method_left_the_fast_path():
    from fedtailor.engine.setup import build_task, make_plan
    from fedtailor.laws.ground import federation, network

    rows = federation()
    blocks = build_task(network(), rows, 0, torch.float64, bias=True)
    model = nn.Linear(rows.train.x.shape[1], 3)
    linear = build_task(model, rows, 0, torch.float64, bias=True)
    plans = {
        m: make_plan(m, t, rows, 4, 0, "size") for m, t in ((Ridge(), linear), (ft.FedAvg(), linear), (ft.PartialFed(), blocks))
    }
    notes = [probe(plan)["notes"] for plan in plans.values()]
    assert notes[1:] == [(), ()]
    assert len(notes[0]) == 1
    assert notes[0][0].startswith("Ridge descends on task.risk with more around it")
