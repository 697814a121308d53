"""Training that runs away is called diverged, with the round and the step size, long before its numbers stop being finite."""

from __future__ import annotations

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.advisor.pilot import Race
from fedtailor.engine.divergence import ABSURD, loss_of_zero
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import prepare
from fedtailor.errors import Diverged, InvalidArgument
from fedtailor.local.schedule import Exponential, Milestones
from tests import make


def one_number(y, test_x=1.0, **options):
    """Two clients whose only feature is 1 and whose targets are ``y``."""
    train = [(np.ones((4, 1)), np.full(4, y))] * 2
    test = [(np.full((2, 1), test_x), np.full(2, y))] * 2
    return ft.Federation.from_arrays(train, test, names=["ann", "bob"], task="regression", **options)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize(("growth", "diverges"), [(900.0, False), (1100.0, True)])
def test_a_loss_a_million_times_that_of_predicting_zero_has_diverged(growth, diverges, engine):
    """x = 1, y = 1 from w = 0: a step of lr multiplies the error by 1 - lr, and the loss by its square."""
    options = {"rounds": 1, "bias": False, "engine": engine}
    if not diverges:
        run = ft.run(ft.Local(lr=1 + growth, steps=1), one_number(1.0), **options)
        assert run.summary["loss_personal"] == pytest.approx(growth**2 / 2)
        return
    with pytest.raises(Diverged, match=r"in round 0, lr = 1101: the loss of clients ann, bob is 6e\+05, where") as info:
        ft.run(ft.Local(lr=1 + growth, steps=1), one_number(1.0), **options)
    assert (info.value.round, info.value.lr, info.value.clients) == (0, 1101.0, ["ann", "bob"])
    assert "\n" not in str(info.value)


def test_the_rule_is_relative_to_the_targets():
    """Targets of a million have a loss of 5e11 at the start, which is no divergence."""
    run = ft.run(ft.Local(lr=0.1, steps=1), one_number(1e6), rounds=2, bias=False)
    assert run.summary["loss_personal"] > 1e11


def test_an_outlier_among_the_test_rows_is_no_divergence():
    run = ft.run(ft.Local(lr=0.5, steps=3), one_number(1.0, test_x=1e6), rounds=3, bias=False)
    assert run.summary["loss_personal"] > ABSURD


def test_the_loss_of_zero_is_that_of_all_classes_alike():
    federation = make.federation([40, 50])
    assert loss_of_zero(LoopEngine(prepare(ft.FedAvg(), federation).plan, workers=1)) == pytest.approx(np.log(2), rel=1e-6)
    numbers = one_number(3.0)
    assert loss_of_zero(LoopEngine(prepare(ft.FedAvg(), numbers).plan, workers=1)) == pytest.approx(4.5)


def test_targets_of_zero_set_no_limit():
    ft.run(ft.FedAvg(lr=0.1), one_number(0.0), rounds=2)


def test_a_schedule_names_the_step_size_of_the_round():
    with pytest.raises(Diverged, match="in round 2, lr = 40"):
        ft.run(ft.Local(lr=Exponential(0.1, 20.0), steps=2), one_number(1.0), rounds=5, bias=False, evaluate_every=1)


def test_a_number_that_is_not_finite_names_the_step_size_too():
    with pytest.raises(Diverged, match=r"in round 0, lr = 1e\+30: the upload of clients bob, ann is not finite"):
        ft.run(ft.FedAvg(lr=1e30, steps=3), one_number(1.0), rounds=2)


def test_a_run_that_diverges_keeps_what_came_before(tmp_path):
    with pytest.raises(Diverged, match="round 2"):
        ft.run(
            ft.Local(lr=Exponential(0.1, 20.0), steps=2), one_number(1.0), rounds=5, bias=False, evaluate_every=1, out=tmp_path
        )
    assert len([line for line in (tmp_path / "history.jsonl").read_text().splitlines() if '"client"' not in line]) == 2


def test_a_method_that_runs_away_is_out_of_the_race():
    federation = one_number(1.0, val=[(np.ones((2, 1)), np.ones(2))] * 2)
    race = Race(prepare(ft.Local(), federation, options=Options(bias=False)).task, federation, Options(bias=False, rounds=2))
    race.enter("good", ft.Local(lr=0.1))
    race.enter("bad", ft.Local(lr=1e4, steps=2))
    for label in ("good", "bad"):
        race.go(label, 1)
    assert [entrant.label for entrant in race.standing()] == ["good"]


def test_a_sweep_that_runs_away_is_refused_by_name():
    federation = make.federation([12, 14], kind="regression", val=True)
    with pytest.raises(InvalidArgument, match=r"local diverges .* lr = .* the loss of .* smaller lr"):
        ft.sweep(federation, "mlp:4", lams=(0.1, 1.0), lr=8.0, steps=2, rounds=4, dynamic=False)


def test_one_that_runs_away_late_is_named_and_not_in_the_table(monkeypatch):
    """FedAvg is given a step size that is good in the first part of the race and absurd in the second."""
    from fedtailor.advisor import advise

    def fedavg(lr, **work):
        return ft.FedAvg(lr=Milestones(0.2, (2,), 1e4), **work)

    monkeypatch.setattr(advise, "FedAvg", type("Growing", (), {"__new__": lambda _, **given: fedavg(**given)}))
    monkeypatch.setattr(advise, "_regime_of", lambda algorithm: (0.0, "local"))
    federation = make.federation([12, 14, 13], kind="regression", val=True)
    advice = ft.advise(federation, rounds=10, steps=3)
    (note,) = [note for note in advice.notes if "out of the race" in note]
    assert note.startswith(("FedAvg diverged in round 2", "FedAvg diverged in round 3", "FedAvg diverged in round 4"))
    assert "FedAvg" not in [row["method"] for row in advice.race]
    assert all(np.isfinite(row["val_loss"]) for row in advice.race)
