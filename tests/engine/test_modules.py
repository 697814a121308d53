"""Modules of one's own: right on every engine, or refused, or moved to the loop engine with the reason."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedtailor as ft
from fedtailor import tree
from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.local import descend
from fedtailor.task import Task
from tests.make import federation, seeded

SIZES = (7, 5, 9, 6, 8)
DATA = federation(SIZES)
SETTINGS: dict[str, Any] = {"rounds": 3, "batch_size": 3, "seed": 4, "dtype": "float64", "evaluate_every": 0}


class Small(nn.Module):
    """Two layers, with something between them."""

    def __init__(self, between=lambda h, training: h):
        super().__init__()
        self.first, self.out, self.between = nn.Linear(3, 6), nn.Linear(6, 2), between

    def forward(self, x):
        return self.out(self.between(torch.tanh(self.first(x)), self.training))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(1, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.3, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.layer(self.lift(x.unsqueeze(-1))).mean(1))


class Recurrent(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.lstm = nn.LSTM(1, 4, num_layers=2, dropout=dropout, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.lstm(x.unsqueeze(-1))[0][:, -1])


RANDOM = {
    "functional dropout": lambda: Small(lambda h, training: F.dropout(h, 0.5, training)),
    "noise": lambda: Small(lambda h, training: h + 0.3 * torch.randn_like(h) if training else h),
    "one number": lambda: Small(lambda h, training: h * (1 + torch.rand(())) if training else h),
    "alpha dropout": lambda: nn.Sequential(nn.Linear(3, 6), nn.SELU(), nn.AlphaDropout(0.4), nn.Linear(6, 2)),
    "transformer": Encoder,
    "lstm": lambda: Recurrent(0.5),
}
MIXING = {
    "centred": lambda: Small(lambda h, training: h - h.mean(0)),
    "scaled in training": lambda: Small(lambda h, training: h / (1 + h.std(0, correction=0)) if training else h),
    "a first row": lambda: Small(lambda h, training: h + h.sum(0, keepdim=True)),
}


def trained(module, method=None, **settings):
    torch.manual_seed(int(np.random.default_rng().integers(2**31)))  # what is outside must not matter
    return ft.run(method or ft.Ditto(lr=0.2, epochs=2), DATA, module, **{**SETTINGS, **settings})


def numbers(run):
    return [run.shared, run.personal_tree("0") if hasattr(run, "personal_tree") else run.store.get(np.arange(len(DATA)))]


def assert_same(a, b):
    for one, other in zip(numbers(a), numbers(b), strict=True):
        for (path, p), q in zip(tree.items(one), tree.leaves(other), strict=True):
            assert torch.equal(p, q), path


@pytest.mark.parametrize("kind", RANDOM)
def test_what_a_module_draws_depends_on_the_seed_alone_not_on_workers_or_what_was_drawn_before(kind):
    module = seeded(RANDOM[kind])
    one = trained(module, engine="loop", workers=1)
    assert_same(trained(module, engine="loop", workers=2), one)
    other = trained(module, engine="loop", workers=1, seed=5)
    assert any(not torch.equal(p, q) for p, q in zip(tree.leaves(one.shared), tree.leaves(other.shared), strict=True))
    by_itself = trained(module, engine="auto", workers=1)
    assert by_itself.summary["engine"] == "loop"
    assert "draws" in by_itself.summary["engine_reason"]
    assert_same(by_itself, one)
    with pytest.raises(InvalidArgument, match=r"draws.*use engine='loop'"):
        trained(module, engine="vectorized")


def test_clients_and_steps_draw_numbers_of_their_own():
    drawn: list[float] = []

    def between(h, training):
        if training:
            drawn.append(float(torch.rand(())))
        return h

    trained(seeded(lambda: Small(between)), ft.FedAvg(lr=0.1, epochs=2), engine="loop", workers=1, rounds=2)
    steps = 2 * sum(2 * -(-n // 3) for n in SIZES)
    assert steps == 52
    assert len(set(drawn)) >= steps  # a few more were drawn when the module was tried


def test_draws_leave_the_callers_generator_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    ft.run(ft.FedAvg(), DATA, seeded(RANDOM["noise"]), **SETTINGS)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draw", [lambda: np.random.rand(), random.random], ids=["numpy", "python"])
def test_other_generators_are_refused(draw):
    with pytest.raises(InvalidArgument, match=r"global generator.*draw with torch"):
        trained(seeded(lambda: Small(lambda h, training: h * draw())))


@dataclass(frozen=True, kw_only=True)
class Jumping(ft.Algorithm):
    """Clients add noise of their own to the model that they send."""

    def init_server(self, task):
        return {"model": tree.map(torch.randn_like, task.init())}, {}

    def client_update(self, task, shared, personal, data, rnd):
        new = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"model": tree.map(lambda leaf: leaf + 0.1 * torch.randn_like(leaf), new)}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.map(lambda leaf: leaf * (1 + 0.01 * torch.rand(())), upload["model"])}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)


def test_a_method_that_draws_by_itself_is_reproducible_on_the_loop_engine_and_refused_under_vmap():
    one = trained("linear", Jumping(), engine="loop", workers=1)
    assert_same(trained("linear", Jumping(), engine="loop", workers=2), one)
    by_itself = trained("linear", Jumping(), engine="auto", workers=1)
    assert by_itself.summary["engine_reason"].startswith("loop: this cannot be vectorized (Jumping or its model draws")
    assert_same(by_itself, one)
    with pytest.raises(InvalidArgument, match="draws from torch's generator"):
        trained("linear", Jumping(), engine="vectorized")


@pytest.mark.parametrize("kind", MIXING)
def test_a_module_that_mixes_rows_is_not_given_padded_ones(kind):
    module = seeded(MIXING[kind])
    loop = trained(module, engine="loop", workers=1)
    by_itself = trained(module, engine="auto", workers=1)
    assert by_itself.summary["engine"] == "loop"
    assert "rows" in by_itself.summary["engine_reason"]
    assert_same(by_itself, loop)
    with pytest.raises(InvalidArgument, match=r"rows.*use engine='loop'"):
        trained(module, engine="vectorized")


def test_modules_that_keep_every_promise_may_be_vectorized():
    module = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 2))
    for own in (seeded(lambda: module), seeded(Small)):
        loop, stacked = (trained(own, engine=engine, workers=1) for engine in ("loop", "vectorized"))
        for p, q in zip(tree.leaves(loop.shared), tree.leaves(stacked.shared), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-11)


def test_a_derivative_inside_vmap_of_a_module_that_might_draw_is_taken_on_both_engines():
    """Before: APFL, which differentiates by itself, failed with torch's error on every module of a class of one's own."""
    loop, stacked = (trained(seeded(Small), ft.APFL(lr=0.2), engine=engine, workers=1) for engine in ("loop", "vectorized"))
    for p, q in zip(tree.leaves(loop.shared), tree.leaves(stacked.shared), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-11)


# -- losses ------------------------------------------------------------------------------------------------------------
def smoothed(logits, y):
    return F.cross_entropy(logits, y, reduction="none", label_smoothing=0.3)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_linear_task_is_trained_with_the_loss_that_it_was_given(engine):
    task = replace(Task.from_module(seeded(nn.Linear, 3, 2)), example_loss=smoothed)
    assert task.gradient is None
    assert task.clipped is None
    run = ft.run(ft.Local(lr=0.3, steps=1), DATA, task, engine=engine, workers=1, **{**SETTINGS, "batch_size": None, "rounds": 1})
    found = run.store.get(np.array([1]))["model"]
    start = tree.map(lambda leaf: leaf.requires_grad_(), task.init())
    x, y = DATA.to(torch.float64).train.client(1)
    slopes = torch.autograd.grad(smoothed(task.apply(start, x), y).mean(), list(start.values()))
    for (name, leaf), slope in zip(start.items(), slopes, strict=True):
        torch.testing.assert_close(found[name][0], leaf.detach() - 0.3 * slope, rtol=1e-10, atol=1e-12)


def test_another_copy_of_a_linear_task_keeps_its_closed_form():
    task = Task.from_module(seeded(nn.Linear, 3, 2))
    assert replace(task, seed=3).gradient is not None
    assert replace(task, apply=lambda model, x: 2 * x @ model["weight"].T).gradient is None


def test_a_private_step_clips_the_gradient_of_the_loss_that_was_given():
    task = replace(Task.from_module(seeded(nn.Linear, 3, 2)), example_loss=lambda logits, y: 100 * smoothed(logits, y))
    opt = ft.Private(clip=0.5, noise=1e-9, seed=0)
    method = ft.Local(lr=1.0, steps=1, opt=opt)
    runs = [ft.run(method, DATA, task, engine=e, workers=1, **{**SETTINGS, "rounds": 1}) for e in ("loop", "vectorized")]
    found = [run.store.get(np.arange(len(DATA)))["model"] for run in runs]
    moved = sum(((found[0][name][0] - leaf) ** 2).sum() for name, leaf in task.init().items()).sqrt()
    assert 0.1 < float(moved) <= 0.5 * 7 / 3 + 1e-6  # every row's gradient is far longer than the clip
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-8, atol=1e-10)


def test_a_loss_that_takes_the_mean_over_rows_is_refused():
    task = replace(Task.from_module(seeded(nn.Linear, 3, 2)), example_loss=F.cross_entropy)
    with pytest.raises(InvalidArgument, match="one number per row"):
        ft.run(ft.Local(), DATA, task, **SETTINGS)


# -- compiled, tied, lazy ----------------------------------------------------------------------------------------------
def normed():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2))


class Half(nn.Module):
    """A network of which one layer is compiled."""

    def __init__(self, first):
        super().__init__()
        self.body, self.out = torch.compile(first[:3], backend="eager"), first[4]

    def forward(self, x):
        return self.out(self.body(x))


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), compiled_in_place], ids=["wrapped", "in place"])
def test_a_compiled_module_is_trained_as_it_was_written(engine, wrap):
    plain = trained(seeded(normed), engine=engine, workers=1)
    compiled = trained(wrap(seeded(normed)), engine=engine, workers=1)
    assert list(compiled.shared["model"]) == list(plain.shared["model"])
    assert_same(compiled, plain)


def test_a_run_says_that_a_module_was_not_compiled():
    run = trained(torch.compile(seeded(normed), backend="eager"))
    assert any("not compiled" in note for note in run.summary["notes"])


def test_a_compiled_layer_is_trained_as_it_was_written():
    task = Task.from_module(Half(seeded(normed)))
    assert "buffer:body.1.running_mean" in task.init()
    loop, stacked = (trained(Half(seeded(normed)), engine=engine, workers=1) for engine in ("loop", "vectorized"))
    torch.testing.assert_close(stacked.shared["model"]["out.weight"], loop.shared["model"]["out.weight"], rtol=1e-9, atol=1e-11)


class Tied(nn.Module):
    """The last layer has the weights of the first, as a language model's often has."""

    def __init__(self, bias=True):
        super().__init__()
        self.emb, self.mid, self.out = nn.Linear(3, 2, bias=False), nn.Linear(2, 3), nn.Linear(3, 2, bias=bias)
        self.out.weight = self.emb.weight

    def forward(self, x):
        return self.out(torch.tanh(self.mid(self.emb(x))))


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_tied_weight_is_one_parameter_with_both_layers_gradients(engine):
    module = seeded(Tied)
    run = ft.run(
        ft.Local(lr=0.3, steps=1), DATA, module, engine=engine, workers=1, **{**SETTINGS, "batch_size": None, "rounds": 1}
    )
    found = run.store.get(np.array([2]))["model"]
    x, y = DATA.to(torch.float64).train.client(2)
    F.cross_entropy(module(x), y).backward()
    want = {name: p.detach() - 0.3 * p.grad for name, p in module.named_parameters()}
    assert set(found) == set(want) == {"emb.weight", "mid.weight", "mid.bias", "out.bias"}
    for name, leaf in want.items():
        torch.testing.assert_close(found[name][0], leaf, rtol=1e-10, atol=1e-12)
    assert any("tied" in note for note in run.summary["notes"])


def test_a_run_starts_from_the_state_dict_of_a_tied_module():
    """It has the parameter under both names; a file may have it under either."""
    module, other = seeded(Tied), seeded(Tied, seed=1)
    state = other.state_dict()
    assert {"emb.weight", "out.weight"} <= set(state)
    for lacks in ("", "emb.weight", "out.weight"):
        given = {name: value for name, value in state.items() if name != lacks}
        begun = trained(module, ft.FedAvg(lr=1e-30), start=given, rounds=1).shared["model"]
        assert torch.equal(begun["emb.weight"], state["out.weight"])
    with pytest.raises(ModelMismatch, match=r"other values in out.weight than in emb.weight"):
        trained(module, start={**state, "out.weight": state["out.weight"] + 1})


def test_the_groups_of_a_tied_module_name_parameters_of_the_model():
    task = Task.from_module(seeded(Tied))
    assert task.groups["head"] == ("emb.weight", "out.bias")
    assert task.groups["body"] == ("mid.weight", "mid.bias")
    assert task.head == "out"
    x = DATA.to(torch.float64).train.x[:4]
    model = task.init()
    expected = torch.tanh(F.linear(F.linear(x, model["emb.weight"]), model["mid.weight"], model["mid.bias"]))
    torch.testing.assert_close(task.features(model, x), expected)


def test_layers_that_share_weights_are_not_routed_one_by_one():
    chain = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False), nn.Linear(3, 2))
    chain[2].weight = chain[0].weight
    assert Task.from_module(chain).blocks == ()
    assert len(Task.from_module(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))).blocks) == 2


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("method", [ft.FedPer(lr=0.2, epochs=1), ft.FedRep(lr=0.2), ft.LGFedAvg(lr=0.2), ft.FedBABU(lr=0.2)])
def test_methods_that_split_the_model_take_a_tied_one(engine, method):
    assert np.isfinite(trained(seeded(Tied), method, engine=engine, workers=1, rounds=2).summary["loss_personal"])


def test_a_lazy_layer_says_what_to_do():
    with pytest.raises(InvalidArgument, match=r"layer 0 is lazy.*module\(x\)"):
        trained(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))


def test_a_lazy_layer_that_has_met_a_batch_is_trained():
    module = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    module(torch.zeros(1, 3))
    assert trained(module).summary["rounds"] == 3


def test_torchscript_is_refused():
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    with pytest.raises(InvalidArgument, match="TorchScript"):
        trained(scripted)


def test_an_lstm_of_torchs_takes_the_loop_engine_or_says_why():
    module = seeded(Recurrent)
    run = trained(module, engine="auto", workers=1)
    assert run.summary["engine_reason"].startswith("loop: the module cannot be vectorized")
    with pytest.raises(InvalidArgument, match=r"cannot be vectorized.*use engine='loop'"):
        trained(module, engine="vectorized")


# -- buffers -----------------------------------------------------------------------------------------------------------
class Following(nn.Module):
    """Centres rows by a mean that follows the data, written in place or rebound."""

    def __init__(self, in_place):
        super().__init__()
        self.first, self.out, self.in_place = nn.Linear(3, 2), nn.Linear(2, 2), in_place
        self.register_buffer("level", torch.zeros(2))

    def forward(self, x):
        h = self.first(x)
        if self.training:
            now = h.detach()[:1].mean(0)  # of the first row, so that padding does not matter
            if self.in_place:
                self.level.mul_(0.9).add_(now, alpha=0.1)
            else:
                self.level = 0.9 * self.level + 0.1 * now
        return self.out(h - self.level)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_buffer_that_is_written_in_place_moves_as_one_that_is_rebound(engine):
    runs = [trained(seeded(Following, in_place), engine=engine, workers=1) for in_place in (True, False)]
    assert float(runs[0].shared["model"]["buffer:level"].abs().max()) > 1e-3
    for p, q in zip(tree.leaves(runs[0].shared), tree.leaves(runs[1].shared), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2)
        self.register_buffer("met", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.met += 1
        return self.out(x) * torch.clamp(self.met / 10, max=1.0)


def test_a_count_in_whole_numbers_is_refused():
    with pytest.raises(InvalidArgument, match="buffer met counts in whole numbers"):
        trained(seeded(Counting))


def test_a_memory_outside_the_buffers_is_refused():
    seen: list[Any] = []

    def between(h, training):
        seen.append(h.detach())
        return h * (1 + 0.1 * len(seen))

    with pytest.raises(InvalidArgument, match="remembers something"):
        trained(seeded(lambda: Small(between)))


@dataclass(frozen=True, kw_only=True)
class Features(ft.Algorithm):
    """An own risk on ``task.features``: the squared length of the head's input beside the loss."""

    def init_server(self, task):
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        def risk(model, batch):
            return task.risk(model, batch) + 0.1 * task.mean_over(task.features(model, batch["x"]).square().sum(1), batch)

        return {"model": descend(risk, shared["model"], data, self.optimizer(rnd))}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": upload["model"]}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)


def test_an_own_risk_on_the_features_of_a_network_with_batch_norm_runs_on_both_engines():
    loop, stacked = (trained(seeded(normed), Features(lr=0.1), engine=engine, workers=1) for engine in ("loop", "vectorized"))
    assert float(loop.shared["model"]["buffer:1.running_mean"].abs().max()) > 1e-3
    for p, q in zip(tree.leaves(loop.shared), tree.leaves(stacked.shared), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-11)
