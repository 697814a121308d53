"""Rows changed in every step, with numbers that depend on seed, round, client, step and row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import tree
from fedtailor.data.augment import Draw
from fedtailor.data.feed import Feed
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import prepare
from fedtailor.errors import InvalidArgument
from tests.make import federation, seeded

DATA = federation((7, 5, 9, 6))
SETTINGS = {"rounds": 2, "dtype": "float64", "batch_size": 4, "evaluate_every": 0}


def noisy(x, draw):
    return torch.where(draw.chance(0.5, x), x.flip(-1), x) + 0.3 * draw.normal(*x.shape[1:])


def network():
    return seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))


def numbers(run):
    return [*tree.leaves(run.shared), *tree.leaves(run.store.get(np.arange(len(DATA))))]


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize(
    "method",
    [ft.Ditto(lr=0.2, epochs=2), ft.APFL(lr=0.2, epochs=1), ft.KNNPer(lr=0.2, epochs=1), ft.FedCLUP(lr=0.2, steps=3)],
    ids=lambda m: type(m).__name__,
)
def test_rows_are_changed_alike_on_both_engines_and_with_any_number_of_workers(method, batch_size):
    settings = {**SETTINGS, "augment": noisy, "batch_size": batch_size}
    one, two, stacked = (
        ft.run(method, DATA, network(), **settings, **how)
        for how in ({"engine": "loop", "workers": 1}, {"engine": "loop", "workers": 2}, {"engine": "vectorized"})
    )
    plain = ft.run(method, DATA, network(), **{**settings, "augment": None}, engine="vectorized")
    assert all(torch.equal(p, q) for p, q in zip(numbers(one), numbers(two), strict=True))
    for p, q in zip(numbers(one), numbers(stacked), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-8, atol=1e-10)
    assert any(not torch.allclose(p, q) for p, q in zip(numbers(plain), numbers(stacked), strict=True))


def seen(feed, round):
    """(row as it was, row as it came) of every step of client 2."""
    data = feed.one(2, round)
    raw = Feed(feed.federation, feed.phases, feed.batch_size, feed.seed).one(2, round)
    return [(b["x"], a["x"]) for a, b in zip(data.batches(), raw.batches(), strict=True)]


def test_numbers_are_of_each_row_step_and_round():
    feed = prepare(ft.FedAvg(epochs=3), DATA, "linear", Options(augment=noisy, batch_size=4, dtype="float64")).plan.feed
    changes = [(after - before) for r in (0, 1) for before, after in seen(feed, r)]
    flat = torch.cat(changes).numpy()
    assert len(np.unique(flat.round(12), axis=0)) == len(flat)
    padded = feed.many(np.array([2, 0]), 0)
    for step, (_, after) in enumerate(seen(feed, 0)):
        assert torch.equal(padded["x"][step, 0, : len(after)], after)
    view = feed.one(2, 0)
    assert torch.equal(view["x"][1, :4], seen(feed, 0)[1][1])


def test_draws_are_uniform_and_normal():
    draw = Draw(np.arange(4000, dtype=np.uint64), torch.zeros(1, dtype=torch.float64))
    u, n, k = draw.uniform(5).numpy(), draw.normal(5).numpy(), draw.integers(2, 5, 5).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * (1 / 12 / u.size) ** 0.5
    assert abs(n.mean()) < 4 / n.size**0.5
    assert abs(n.var() - 1) < 4 * (2 / n.size) ** 0.5
    assert set(k.reshape(-1)) == {2, 3, 4}
    assert abs(float(draw.chance(0.25).double().mean()) - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5
    assert not np.array_equal(draw.uniform(5).numpy(), u)


def test_privacy_clips_the_gradients_of_changed_rows_alike_on_both_engines():
    method = ft.FedAvg(lr=0.2, epochs=1, opt=ft.Private(clip=0.5, noise=0.5, seed=0))
    loop, stacked = (
        ft.run(method, DATA, network(), **SETTINGS, augment=noisy, engine=e, workers=1) for e in ("loop", "vectorized")
    )
    for p, q in zip(numbers(loop), numbers(stacked), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-8, atol=1e-10)


def test_frozen_first_layers_see_the_changed_rows():
    module = network()
    module[0].requires_grad_(False)
    loop, stacked = (
        ft.run(ft.FedAvg(lr=0.2), DATA, module, **SETTINGS, augment=noisy, engine=e, workers=1) for e in ("loop", "vectorized")
    )
    plain = ft.run(ft.FedAvg(lr=0.2), DATA, module, **SETTINGS, engine="loop", workers=1)
    assert not torch.allclose(loop.shared["model"]["2.weight"], plain.shared["model"]["2.weight"])
    torch.testing.assert_close(stacked.shared["model"]["2.weight"], loop.shared["model"]["2.weight"])


def test_draws_of_its_own_that_only_long_batches_see_are_refused():
    """Before: four rows were tried, and a draw for five or more was met in training alone."""
    with pytest.raises(InvalidArgument, match="draws from a global generator"):
        ft.run(ft.FedAvg(), DATA, augment=lambda x, draw: x + (np.random.rand() if len(x) > 4 else 0), rounds=1, batch_size=5)


def test_parts_are_changed_as_parts():
    def blinded(x, draw):
        return {**x, "table": torch.where(draw.chance(1.0, x["table"]), 0 * x["table"], x["table"])}

    x = {"table": np.ones((6, 3)), "kind": np.arange(6)}
    fed = ft.Federation.from_arrays([(x, np.arange(6) % 2)], [(x, np.arange(6) % 2)])
    feed = prepare(ft.FedAvg(), fed, lambda: _Both(), Options(augment=blinded)).plan.feed
    (batch,) = feed.one(0, 0).batches()
    parts = fed.packing.unpack(batch["x"])
    assert float(parts["table"].abs().max()) == 0
    assert torch.equal(parts["kind"], torch.arange(6))


class _Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind, self.out = nn.Embedding(6, 3), nn.Linear(3, 2)

    def forward(self, table, kind):
        return self.out(table + self.kind(kind))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x, draw: x + torch.randn_like(x), "draws from a global generator"),
        (lambda x, draw: x - x.mean(0), "mixes rows"),
        (lambda x, draw: x[:, :2], r"makes \(4, 2\)"),
        (lambda x, draw: x.mul_(2), "in place"),
        (lambda x: x, "called with"),
    ],
)
def test_functions_that_break_the_promises_are_refused(function, says):
    with pytest.raises(InvalidArgument, match=says):
        ft.run(ft.FedAvg(), DATA, augment=function, **SETTINGS)
