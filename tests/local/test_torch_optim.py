"""torch's optimisers, optimisers and step sizes of one's own: torch's numbers, on both engines."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor import tree
from fedtailor.algorithms.settings import build, settings
from fedtailor.cli import app
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend
from tests.make import federation, seeded

DATA = federation((7, 5, 9))
SETTINGS = {"rounds": 1, "workers": 1, "dtype": "float64", "evaluate_every": 0}
OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"betas": (0.8, 0.9), "weight_decay": 0.1},
    "AdamW": {"weight_decay": 0.1, "amsgrad": True},
    "RMSprop": {"alpha": 0.9, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adadelta": {},
    "Adamax": {},
    "RAdam": {},
    "Rprop": {},
}


def network():
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def by_torch(kind, options, steps, lr=0.05):
    module = network().double()
    optimizer = kind(module.parameters(), lr=lr, **options)
    x, y = DATA.to(torch.float64).train.client(1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_optimisers_take_torchs_steps_on_both_engines(name, engine):
    opt = ft.TorchOptimizer(name, OPTIMIZERS[name])
    run = ft.run(ft.Local(lr=0.05, steps=6, opt=opt), DATA, network(), engine=engine, **SETTINGS)
    model = run.store.get(np.array([1]))["model"]
    for leaf, value in by_torch(getattr(torch.optim, name), OPTIMIZERS[name], 6).items():
        torch.testing.assert_close(model[leaf][0], value, rtol=1e-9, atol=1e-11)


class Signs(torch.optim.Optimizer):
    """Steps by the sign of a running mean: an optimiser of the user's own in torch's form."""

    def __init__(self, params, lr=0.1, keep=0.9):
        super().__init__(params, {"lr": lr, "keep": keep})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["keep"]).add_(p.grad, alpha=1 - group["keep"])
                p.sub_(mean.sign(), alpha=group["lr"])


@dataclass(frozen=True)
class Rows(ft.Optimizer):
    """A pure one: the gradient cut to [-most, most]."""

    most: float = 0.1

    def _move_(self, param, grad, memory, lr, step):
        param.sub_(grad.clamp(-self.most, self.most) * lr)


@dataclass(frozen=True, kw_only=True)
class Closure(ft.Local):
    """A risk of its own, which the vectorized engine differentiates under vmap."""

    def client_update(self, task, shared, personal, data, rnd):
        risk = lambda model, batch: 2.0 * task.risk(model, batch)  # noqa: E731
        return {}, {"model": descend(risk, personal["model"], data, self.optimizer(rnd))}


@pytest.mark.parametrize(
    "opt", [ft.TorchOptimizer(Signs, {"keep": 0.5}), Rows(most=0.02), ft.TorchOptimizer("RMSprop")], ids=repr
)
@pytest.mark.parametrize("method", [ft.Ditto, Closure], ids=["ditto", "closure"])
def test_engines_agree_with_an_optimiser_of_ones_own(opt, method):
    made = method(lr=0.05, epochs=2, opt=opt)
    loop, stacked = (ft.run(made, DATA, network(), engine=e, batch_size=3, **SETTINGS) for e in ("loop", "vectorized"))
    for p, q in zip(tree.leaves(loop.store.get(np.arange(3))), tree.leaves(stacked.store.get(np.arange(3))), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-11)


def test_a_private_descent_takes_torchs_optimiser():
    method = ft.FedAvg(lr=0.05, epochs=1, opt=ft.Private(opt=ft.TorchOptimizer("RMSprop"), clip=0.5, noise=1.0, seed=0))
    loop, stacked = (ft.run(method, DATA, network(), engine=e, batch_size=3, **SETTINGS) for e in ("loop", "vectorized"))
    for p, q in zip(tree.leaves(loop.shared), tree.leaves(stacked.shared), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("optimizer", "options", "says"),
    [
        ("LBFGS", {}, "cannot be used here"),
        ("Adafactor", {}, "remembers 'row_var'"),
        ("NAdam", {}, "remembers 'mu_product'"),
        ("ASGD", {}, "remembers 'eta'"),
        ("Adam", {"lr": 0.1}, "give lr to the method"),
        ("Adam", {"speed": 3}, "cannot be used here"),
        ("Adamo", {}, "torch.optim has no 'Adamo'"),
        (nn.Linear, {}, r"is no torch\.optim\.Optimizer"),
    ],
)
def test_optimisers_that_cannot_be_stacked_are_refused(optimizer, options, says):
    with pytest.raises(InvalidArgument, match=says):
        ft.TorchOptimizer(optimizer, options)


def test_a_derivative_through_torchs_optimiser_is_refused():
    task = ft.Task.from_module(network().double())
    feed = {
        "x": torch.randn(1, 4, 3).double(),
        "y": torch.zeros(1, 4).long(),
        "mask": torch.ones(1, 4),
        "key": torch.zeros(1).long(),
    }
    opt = ft.TorchOptimizer("Adam").using(0.1, None)
    with pytest.raises(InvalidArgument, match="cannot be differentiated through"):
        torch.func.grad(lambda model: task.risk(descend(task.risk, model, feed, opt), {k: v[0] for k, v in feed.items()}))(
            task.init()
        )


# -- step sizes ---------------------------------------------------------------------------------------------------------
def halved(round):
    return 0.4 / 2**round


def warm(round, step):
    return 0.1 * (step + 1) / (round + 1)


def test_a_function_of_the_round_or_of_the_step_is_the_step_size():
    by_function = ft.run(ft.FedAvg(lr=halved, steps=2), DATA, **{**SETTINGS, "rounds": 3})
    by_schedule = ft.run(ft.FedAvg(lr=ft.Exponential(0.4, 0.5), steps=2), DATA, **{**SETTINGS, "rounds": 3})
    assert all(torch.equal(p, q) for p, q in zip(tree.leaves(by_function.shared), tree.leaves(by_schedule.shared), strict=True))
    stepwise = ft.run(ft.Local(lr=warm, steps=3), DATA, network(), **SETTINGS).store.get(np.array([1]))["model"]
    module = network().double()
    x, y = DATA.to(torch.float64).train.client(1)
    for step in range(3):
        grads = torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))
        with torch.no_grad():
            for p, g in zip(module.parameters(), grads, strict=True):
                p -= warm(0, step) * g
    for name, p in module.named_parameters():
        torch.testing.assert_close(stepwise[name][0], p.detach(), rtol=1e-9, atol=1e-11)


def test_a_step_size_that_is_none_is_refused():
    with pytest.raises(InvalidArgument, match="gives -1 in round 0"):
        ft.FedAvg(lr=lambda round: -1)


@pytest.mark.parametrize(
    "method",
    [ft.FedAvg(lr=halved, opt=ft.TorchOptimizer("RMSprop", {"alpha": 0.8})), ft.FedAvg(opt=Rows(most=0.2))],
    ids=["torch", "own"],
)
def test_they_are_written_down_and_made_again(method):
    again = build(ft.FedAvg, settings(method))
    assert again.opt == method.opt
    assert repr(again) == repr(method)


SOURCE = """
from dataclasses import dataclass
import torch
import fedtailor as ft

def decay(round):
    return 0.5 * 0.9**round

@dataclass(frozen=True)
class Clamped(ft.Optimizer):
    most: float = 0.1

    def _move_(self, param, grad, memory, lr, step):
        param.sub_(grad.clamp(-self.most, self.most) * lr)

class Mine(torch.optim.SGD):
    pass
"""


@pytest.mark.parametrize(
    "opt", ["torch.optim.RMSprop", "mine.py:Clamped", "mine.py:Mine", "adam", '{kind="mine.py:Clamped", most=0.3}']
)
def test_on_the_command_line(opt, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    flags = ["run", "fedavg", "digits", "--clients", "2", "--rounds", "1", "--opt", opt, "--lr", "mine.py:decay", "--out", "done"]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    kept = tomllib.loads((tmp_path / "done/config.toml").read_text())["set"]
    assert kept["lr"]["function"].startswith("mine.py:decay@")
    result = CliRunner().invoke(app, ["resume", "done", "--rounds", "2"])
    assert result.exit_code == 0, result.output
