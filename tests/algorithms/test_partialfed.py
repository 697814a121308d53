"""PartialFed: the straight-through sample, what a layer is, a round by hand, and what clients learn to choose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import tree
from fedtailor.algorithms import partialfed
from fedtailor.algorithms.partialfed import gumbel, layers, mixture, one_hot, straight_through
from fedtailor.data.batches import step_keys
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.rounds import play
from fedtailor.engine.setup import build_task, make_plan
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import InvalidArgument
from fedtailor.laws.ground import network
from fedtailor.runs.store import Store
from fedtailor.task import Task
from tests.make import federation, the_round

WORD = 0xFFFFFFFFFFFFFFFF


def finalised(z: int) -> int:
    """SplitMix64's finaliser, on Python integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def noise(key: int, count: int) -> np.ndarray:
    """The Gumbel numbers of a step, by hand: entry j hashes (key, stream 2^32, j) to 24 bits in the middle of their cell."""
    start = finalised((key + 0x9E3779B97F4A7C15 * (2**32 + 1)) & WORD)
    bits = [finalised((start + j * 0xD1342543DE82EF95) & WORD) >> 40 for j in range(count)]
    u = (np.array(bits) + 0.5) / 2**24
    return -np.log(-np.log(u))


@pytest.fixture
def task() -> Task:
    return Task.from_module(network().double())


# -- the sample -----------------------------------------------------------------------------------------------------------
def test_the_noise_is_a_function_of_the_key_and_is_that_computed_by_hand():
    like = torch.zeros(3, 2, dtype=torch.float64)
    for key in (0, 7, -(2**63) + 5, 2**62 + 1):
        drawn = gumbel(torch.tensor(key), like)
        assert np.abs(drawn.numpy().ravel() - noise(key, 6)).max() < 1e-12
    assert not torch.equal(gumbel(torch.tensor(1), like), gumbel(torch.tensor(2), like))


def test_the_noise_is_finite_at_both_ends_of_the_uniform_numbers(monkeypatch):
    for end in (0.0, 1 - 2**-24):
        monkeypatch.setattr(partialfed, "uniform", lambda key, stream, shape, end=end: torch.full(shape, end))
        for dtype in (torch.float32, torch.float64):
            assert bool(torch.isfinite(gumbel(torch.tensor(0), torch.zeros(2, 2, dtype=dtype))).all())


@pytest.mark.slow
def test_a_layer_is_drawn_as_often_as_the_softmax_of_its_logits_says():
    a = torch.tensor([[0.0, 0.0], [1.0, -0.5]], dtype=torch.float64)
    draws = torch.stack([one_hot(a + gumbel(torch.tensor(key * 7919), a)) for key in range(4000)])
    assert set(draws.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(draws.sum(-1), torch.ones(4000, 2, dtype=torch.float64))
    wanted = torch.softmax(a, -1)
    assert float((draws.mean(0) - wanted).abs().max()) < 4 * 0.5 / 4000**0.5  # four standard deviations


@pytest.mark.parametrize("tau", [0.3, 1.0, 5.0])
def test_the_sample_is_one_hot_forward_and_its_gradient_reaches_the_logits_as_the_softmaxs(tau):
    a = torch.tensor([[0.4, -0.2], [0.0, 0.0], [-3.0, 2.0]], dtype=torch.float64, requires_grad=True)
    key, slope = torch.tensor(5), torch.tensor([[2.0, -1.0], [0.5, 3.0], [1.0, 0.0]], dtype=torch.float64)
    y = straight_through(a, key, tau)
    assert torch.equal(y.detach(), one_hot(a.detach() + gumbel(key, a.detach())))
    (gradient,) = torch.autograd.grad((y * slope).sum(), a)
    z = (a.detach().numpy() + noise(5, 6).reshape(3, 2)) / tau
    s = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    first = s[:, 0] * s[:, 1] / tau * (slope[:, 0] - slope[:, 1]).numpy()
    assert np.abs(gradient.numpy() - np.stack([first, -first], 1)).max() < 1e-12
    assert float(gradient.abs().min()) > 0


# -- layers ---------------------------------------------------------------------------------------------------------------
def test_a_layer_is_a_module_with_its_parameters_and_statistics(task):
    assert layers(task) == ("0", "1", "4")
    assert layers(Task.from_module(nn.Linear(2, 3))) == ("",)
    g, v = task.init(), tree.map(lambda leaf: leaf + 1, task.init())
    choice = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    mixed = mixture(task, g, v, choice)
    assert list(mixed) == list(g)
    norm = {"1.weight", "1.bias", "buffer:1.running_mean", "buffer:1.running_var"}
    for name in mixed:
        assert torch.equal(mixed[name], (v if name in norm else g)[name]), name


def test_statistics_follow_the_choice_and_do_not_move_it(task):
    """A buffer's gradient says where the statistics went; it is no slope of the risk."""
    g = task.init()
    v = {name: leaf + (1.0 if tree.is_buffer(name) else 0.0) for name, leaf in g.items()}
    batch = {"x": torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), "y": torch.arange(5) % 3}
    batch["key"] = torch.tensor(3)
    a = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(task.risk(mixture(task, g, v, straight_through(a, batch["key"], 1.0)), batch), a)
    assert float(gradient.abs().max()) < 1e-15


# -- a round --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", [LoopEngine, VectorizedEngine])
def test_rounds_on_least_squares_are_those_by_hand(engine):
    """One layer: plain arithmetic on weight vectors, with the package's rows and nothing else of it."""
    method = ft.PartialFed(lr=0.1, steps=3, logit_steps=4, logit_lr=0.7, temperature=2.0, cooling=0.5, coldest=0.6)
    data = federation([7, 9, 5], kind="regression").to(torch.float64)
    task = build_task("linear", data, 0, torch.float64, bias=False)
    plan = make_plan(method, task, data, 4, 2, "uniform")
    rows = [tuple(t.numpy() for t in data.train.client(i)) for i in range(3)]

    def slope(w, i, use):
        x, y = rows[i][0][use], rows[i][1][use]
        return x.T @ (x @ w - y) / len(y)

    def keys(i, t, phase, steps):
        return step_keys(plan.feed.keys(np.array([i]), t, phase), steps)[0].tolist()

    g, v, a = np.zeros(3), [np.zeros(3)] * 3, [np.zeros(2)] * 3
    shared, server = method.init_server(task)
    store = Store(3)
    options = {"workers": 1} if engine is LoopEngine else {}
    drawn = set()
    for t, (_, now) in enumerate(play(engine(plan, **options), shared, server, store, 6, 3)):
        tau = (2.0, 1.0, 0.6, 0.6, 0.6, 0.6)[t]
        for i in range(3):
            e = noise(keys(i, t, "train", 3)[0], 2)
            own = bool((a[i] + e).argmax())
            drawn.add(own)
            w = v[i] if own else g
            for use in plan.feed.rows(i, t, "train"):
                w = w - 0.1 * slope(w, i, use)
            for use, key in zip(plan.feed.rows(i, t, "logits"), keys(i, t, "logits", 4), strict=True):
                noisy = a[i] + noise(key, 2)
                s = 1 / (1 + np.exp(-(noisy[0] - noisy[1]) / tau))  # of the shared weights
                at = g if noisy[0] >= noisy[1] else w
                step = 0.7 * s * (1 - s) / tau * (slope(at, i, use) @ (g - w))
                a[i] = a[i] + np.array([-step, step])
            v[i] = w
        g = sum(v) / 3
        state = store.get(np.arange(3))
        assert np.abs(now[0]["model"]["weight"].numpy().ravel() - g).max() < 1e-12
        assert np.abs(state["model"]["weight"].numpy()[:, 0] - np.stack(v)).max() < 1e-12
        assert np.abs(state["logits"].numpy()[:, 0] - np.stack(a)).max() < 1e-12
    assert drawn == {False, True}
    assert np.abs(np.stack(a)).min() > 1e-3


def test_the_temperature_falls_from_round_to_round_to_its_floor(task):
    data = federation([8], d=4).to(torch.float64)
    cooled = ft.PartialFed(steps=2, temperature=4.0, cooling=0.5, coldest=0.8)
    for number, tau in ((0, 4.0), (2, 1.0), (3, 0.8), (9, 0.8)):
        constant = replace(cooled, temperature=tau, cooling=1.0, coldest=tau)
        ends = []
        for method in (cooled, constant):
            batches = make_plan(method, task, data, 4, 0, "uniform").feed.one(0, number)
            shared, _ = method.init_server(task)
            born = method.init_client(task, shared, batches)
            ends.append(method.client_update(task, shared, born, batches, the_round(number=number, rounds=10))[1]["logits"])
        assert torch.equal(*ends)


# -- predicting -----------------------------------------------------------------------------------------------------------
def test_a_client_predicts_with_the_layers_of_the_larger_logit_and_draws_nothing(task):
    method = ft.PartialFed()
    g, v = task.init(), tree.map(lambda leaf: leaf + 1, task.init())
    logits = torch.tensor([[0.1, 0.0], [-2.0, 3.0], [0.0, 0.0]], dtype=torch.float64)  # shared, own, and a tie: shared
    ready = method.personalize(task, {"model": g}, {"model": v, "logits": logits}, None)
    for name, leaf in ready["model"].items():
        assert torch.equal(leaf, (v if name.removeprefix(tree.BUFFER).startswith("1.") else g)[name])
    x = torch.ones(2, 4, dtype=torch.float64)
    assert torch.equal(method.predict(task, {"model": g}, ready, x), task.apply(ready["model"], x))


def test_a_client_has_a_single_model_that_can_be_taken_away():
    data = federation([12, 9, 14], val=True)
    run = ft.run(ft.PartialFed(epochs=1, logit_lr=1.0), data, "mlp:5", rounds=4, batch_size=4)
    x = data.test.client(1)[0].float()
    assert torch.equal(run.task.apply(run.model(1), x), run.predict(1, x))


def test_clients_with_nothing_in_common_learn_to_start_from_their_own_weights():
    """y = x and y = -x: the shared weight is zero, and every client does best with its own."""
    x = np.linspace(-1, 1, 12)[:, None]
    data = ft.Federation.from_arrays(
        [(x, x[:, 0] * sign) for sign in (1.0, -1.0) * 2], [(x, x[:, 0] * sign) for sign in (1.0, -1.0) * 2]
    )
    method = ft.PartialFed(lr=0.5, steps=5, logit_lr=2.0)
    run = ft.run(method, data, rounds=60, bias=False, dtype="float64", evaluate_every=0)
    logits = run.store.get(np.arange(4))["logits"][:, 0]
    assert bool((logits[:, 1] > logits[:, 0] + 1).all())
    assert float(run.shared["model"]["weight"].abs()) < 0.05
    assert run.summary["mse_personal"] < 1e-3 < run.summary["mse_global"]


# -- refusals -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.0}, "temperature must be greater than 0"),
        ({"cooling": 1.5}, "cooling must be at most 1"),
        ({"temperature": 0.4}, "coldest = 0.5 is above temperature = 0.4; lower it"),
        ({"logit_steps": 2, "logit_epochs": 1}, "give logit_steps or logit_epochs, not both"),
    ],
)
def test_refuses_with_a_fix(options, words):
    with pytest.raises(InvalidArgument, match=words):
        ft.PartialFed(**options)


def test_a_part_that_the_model_does_not_have_is_refused():
    with pytest.raises(InvalidArgument, match="no group or module 'tail'"):
        ft.run(ft.PartialFed(personal="tail"), federation([5, 6]), rounds=1)
