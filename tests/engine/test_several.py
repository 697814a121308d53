"""Several settings at once give what each gives by itself, and what cannot be stacked is played one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import prepare
from fedtailor.engine.several import play_together
from fedtailor.engine.tune import Trials, tune
from fedtailor.local import descend

STACKED = ("Local", "FedAvg", "FedProx", "Scaffold", "FedCLUP", "Ditto", "PFedMe", "APFL", "FedRep", "FedAdam", "FedPer", "MTL")
OPTIONS = Options.of({"rounds": 3, "batch_size": 4, "cohort": 3, "engine": "vectorized", "dtype": "float64"})


def federation(clients: int = 5) -> ft.Federation:
    draw = np.random.default_rng(0)

    def rows(count: int) -> tuple[Any, Any]:
        x = draw.normal(size=(count, 4))
        return x, (x @ np.arange(1.0, 5.0) + draw.normal(size=count) > 0).astype(int)

    sizes = range(5, 5 + 3 * clients, 3)  # uneven: clients end after different numbers of steps
    return ft.Federation.from_arrays([rows(n) for n in sizes], [rows(4) for _ in sizes], val=[rows(6) for _ in sizes])


def both(settings: list[ft.Algorithm], model: str = "linear", options: Options = OPTIONS) -> tuple[Any, list[Any]]:
    trials = Trials(federation(), model, options)
    return trials._together(settings, options.rounds), [trials._score(one, options.rounds) for one in settings]


@pytest.mark.parametrize(("name", "model"), [*((name, "mlp:3") for name in STACKED), ("FedCLUP", "linear"), ("Ditto", "linear")])
def test_settings_together_are_each_by_itself(name: str, model: str) -> None:
    method = getattr(ft, name).example()
    numbers = {field: value for field, value in (("lr", 0.2), ("lam", 0.3)) if isinstance(getattr(method, field, None), float)}
    settings = [method, replace(method, **numbers), replace(method, lr=0.05)]
    together, alone = both(settings, model)
    assert together is not None
    for ours, theirs in zip(together, alone, strict=True):
        assert ours["score"] == theirs["score"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
    assert len({trial["loss"] for trial in alone}) > 1  # the settings matter


@pytest.mark.parametrize("opt", [ft.SGD(momentum=0.9, weight_decay=0.01), ft.Adam()])
def test_every_setting_has_an_optimisers_memory_of_its_own(opt: Any) -> None:
    together, alone = both([ft.Ditto(lr=lr, lam=0.1, opt=opt, radius=2.0) for lr in (0.01, 0.1)], "mlp:3")
    assert [t["loss"] for t in together] == pytest.approx([t["loss"] for t in alone], rel=1e-9)


def test_a_setting_that_diverges_leaves_the_others_alone() -> None:
    together, alone = both([ft.FedAvg(lr=lr) for lr in (0.1, 1e200, 0.3)], "mlp:3")
    assert together[1] == alone[1] == {"score": None, "loss": None}
    assert [together[i]["loss"] for i in (0, 2)] == pytest.approx([alone[i]["loss"] for i in (0, 2)], rel=1e-9)


@dataclass(frozen=True, kw_only=True)
class Asks(ft.FedAvg):
    """Looks at its step size, which a tensor of many refuses."""

    def client_update(self, task: Any, shared: Any, personal: Any, data: Any, rnd: Any) -> Any:
        if self.lr > 0.2:
            return {"delta": {name: torch.zeros_like(leaf) for name, leaf in shared["model"].items()}}, {}
        return super().client_update(task, shared, personal, data, rnd)


@dataclass(frozen=True, kw_only=True)
class Sorts(ft.FedAvg):
    """Does something else where its step size is no plain number."""

    def client_update(self, task: Any, shared: Any, personal: Any, data: Any, rnd: Any) -> Any:
        scale = 1.0 if isinstance(self.lr, float) else 2.0
        model = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"delta": {name: scale * (leaf - shared["model"][name]) for name, leaf in model.items()}}, {}


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ([Asks(lr=0.1), Asks(lr=0.3)], {}),
        ([Sorts(lr=0.1), Sorts(lr=0.3)], {}),
        ([ft.FedAvg(epochs=1), ft.FedAvg(epochs=2)], {}),
        ([ft.FedAvg(radius=1.0), ft.FedAvg(radius=2.0)], {}),
        ([ft.FedAvg(lr=0.1), ft.FedAvg(lr=0.3)], {"engine": "loop", "workers": 1}),
        ([ft.FedAvg(lr=lr, opt=ft.TorchOptimizer("SGD")) for lr in (0.1, 0.3)], {}),
        ([ft.FedAvg(lr=lr, opt=ft.Private(clip=1.0, noise=1.0, seed=1)) for lr in (0.1, 0.3)], {}),
    ],
)
def test_what_cannot_be_stacked_is_played_one_by_one(settings: list[ft.Algorithm], changed: Any) -> None:
    together, alone = both(settings, options=OPTIONS.but(**changed))
    assert together is None
    assert all(trial["score"] is not None for trial in alone)


def test_tuning_tells_of_every_round_of_every_setting_and_chooses_the_same() -> None:
    told: list[Any] = []
    heard: list[Any] = []
    trials = Trials(federation(), "linear", OPTIONS, {"lr": [0.01, 0.1, 1.0]}, told.append)
    method, story = tune(ft.FedAvg(lr=0.1), trials)
    single, again = tune(ft.FedAvg(lr=0.1), replace(trials, options=OPTIONS.but(engine="loop", workers=1), callback=heard.append))
    assert method == single
    assert [t["score"] for t in story["trials"]] == [t["score"] for t in again["trials"]]
    assert len(told) == sum(t["rounds"] for t in story["trials"]) == 9
    assert {(r["bytes_down"], r["bytes_up"]) for r in told} == {(r["bytes_down"], r["bytes_up"]) for r in heard}


def test_the_states_are_those_of_runs_bit_for_bit_but_for_rounding() -> None:
    settings = [ft.FedCLUP(lam=lam, lr=0.1, epochs=2) for lam in (0.1, 1.0)]
    players = play_together([prepare(one, federation(), "linear", OPTIONS) for one in settings])
    assert players is not None
    for player, method in zip(players, settings, strict=True):
        run = ft.run(method, federation(), "linear", OPTIONS)
        for name, leaf in player.state.shared["model"].items():
            torch.testing.assert_close(leaf, run.shared["model"][name], rtol=1e-12, atol=1e-14)
        assert (player.state.store.born == run.store.born).all()
