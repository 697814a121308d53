"""Everything that looks at the rows of a private run is counted, said or refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedtailor as ft
from fedtailor import tree
from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.report.privacy import story
from fedtailor.runs.noise_key import NAME
from tests.make import federation, pairs

NOISE, DELTA = 4.0, 1e-4
OPEN: dict[str, Any] = {"rounds": 3, "evaluate_every": 0, "workers": 1, "engine": "loop"}
CROWD: dict[str, Any] = {"user_clip": 1.0, "user_noise": NOISE, "user_delta": DELTA}


def private(**more: Any) -> ft.Private:
    return ft.Private(noise=NOISE, delta=DELTA, **more)


def is_exactly(value: float, releases: int) -> bool:
    """Whether epsilon is that of so many releases of all rows: one Gaussian mechanism with 1/sqrt(releases) of the noise."""
    exact = dp.get_epsilon_gaussian(NOISE / math.sqrt(releases), DELTA)
    return exact <= value <= exact + 0.01


def with_validation() -> ft.Federation:
    return ft.Federation.from_arrays(pairs([20] * 3), pairs([5] * 3, seed=1), val=pairs([5] * 3, seed=2))


@dataclass(frozen=True, kw_only=True)
class Stumbles(ft.FedAvg):
    """Cannot take a step."""

    def client_update(self, *_: Any) -> Any:
        raise ValueError("oops")


def test_a_method_that_cannot_take_a_step_costs_one_row_and_nothing_of_privacy() -> None:
    methods = {"good": ft.FedAvg(steps=1, opt=private()), "bad": Stumbles(steps=1, opt=private())}
    done = ft.compare(methods, federation([20, 20]), **OPEN)
    assert list(done) == ["good"]
    assert "oops" in done.failed["bad"]
    assert is_exactly(done.privacy["epsilon_composed"], 3)


@dataclass(frozen=True, kw_only=True)
class RunsAway(ft.FedAvg):
    """Trains, and diverges."""

    def server_update(self, *arguments: Any) -> Any:
        shared, server = super().server_update(*arguments)
        return tree.map(lambda leaf: leaf * float("inf"), shared), server


@pytest.mark.parametrize("on_disk", [False, True])
def test_trials_of_a_tuning_that_comes_to_nothing_are_counted(on_disk: bool, tmp_path: Path) -> None:
    methods = {"good": ft.FedAvg(steps=1, lr=0.1, opt=private()), "bad": RunsAway(steps=1, lr=0.1, opt=private())}
    options = {**OPEN, "tune": {"lr": [0.2]}, **({"out": tmp_path / "cmp"} if on_disk else {})}
    with pytest.warns(UserWarning, match="trials of tuning look at the clients' rows too"):
        done = ft.compare(methods, with_validation(), **options)
    assert "diverges with every setting" in done.failed["bad"]
    played = sum(trial["rounds"] for trial in done.tuning["good"]["trials"])
    assert played == 6  # two step sizes; the method that failed tries as many, and is charged for the run it might have had
    assert is_exactly(done.privacy["epsilon_composed"], 2 * (played + 3))
    if on_disk:  # what is read back says the same
        with pytest.warns(UserWarning, match="trials of tuning"):
            again = ft.compare(methods, with_validation(), resume=True, **options)
        assert again.privacy == done.privacy


def test_whole_clients_are_charged_for_all_methods_seeds_and_trials() -> None:
    done = ft.compare([ft.FedAvg(steps=1), ft.Ditto(steps=1)], federation([9] * 4), seeds=2, **CROWD, **OPEN)
    assert is_exactly(done.table()[0]["user_epsilon"], 3)
    assert is_exactly(done.table()[0]["user_epsilon_composed"], 3 * 2 * 2)
    assert "epsilon_composed" not in done.table()[0]  # rows have no privacy of their own
    assert any("of a whole client" in line and "Whoever sees all" in line for line in story({"a": done.summaries("FedAvg")[0]}))
    with pytest.warns(UserWarning, match="trials of tuning"):
        tuned = ft.compare([ft.FedAvg(steps=1, lr=0.1)], with_validation(), tune={"lr": [0.2]}, **CROWD, **OPEN)
    played = sum(trial["rounds"] for trial in tuned.tuning["FedAvg"]["trials"])
    assert played > 0
    assert is_exactly(tuned.privacy["user_epsilon_composed"], played + 3)


def test_clients_that_are_held_out_are_charged_too() -> None:
    fed = federation([20, 20, 20, 200])
    run = ft.run(ft.Ditto(steps=1, opt=private()), fed, new_clients=0.5, **OPEN)
    assert is_exactly(run.summary["new_epsilon_max"], 2)  # both branches of Ditto, one round
    done = ft.compare([ft.Ditto(steps=1, opt=private())], fed, new_clients=0.5, seeds=4, **OPEN)
    held_out = [set(run.federation.names) - set(run.engine.plan.federation.names) for run in done.all["Ditto"]]
    once = {name for names in held_out for name in names}
    rounds = {name: sum(1 if name in names else 3 for names in held_out) for name in once}
    assert is_exactly(done.privacy["epsilon_composed"], 2 * max(rounds.values()) if len(once) == len(fed) else 2 * 12)


@pytest.mark.parametrize("kind", ["rows", "clients"])
def test_the_run_that_was_the_start_counts(kind: str, tmp_path: Path) -> None:
    fed, plain = federation([20, 20]), ft.FedAvg(steps=1)
    method, options = (ft.FedAvg(steps=1, opt=private()), OPEN) if kind == "rows" else (plain, {**OPEN, **CROWD})
    key, composed = ("epsilon_max", "epsilon_composed") if kind == "rows" else ("user_epsilon", "user_epsilon_composed")
    ft.run(plain, fed, out=tmp_path / "open", **OPEN)
    with pytest.raises(InvalidArgument, match=r"trained on the same (rows|clients) and did not protect them"):
        ft.run(method, fed, start=tmp_path / "open", **options)
    first = ft.run(method, fed, out=tmp_path / "first", **options).summary
    second = ft.run(method, fed, start=tmp_path / "first", out=tmp_path / "second", **options).summary
    assert second[composed] == pytest.approx(first[key] + second[key])
    third = ft.run(method, fed, start=tmp_path / "second", **options).summary
    assert third[composed] == pytest.approx(3 * first[key])
    done = ft.compare([method, method], fed, start=tmp_path / "first", **options)
    assert first[key] < done.privacy[composed] < 3 * first[key]  # the start once, and two runs
    assert any("Whoever sees all of it" in line for line in story({"FedAvg": second}))


@pytest.mark.parametrize("start", ["run", "file", "state"])
def test_a_start_of_which_it_is_not_known_what_it_has_seen_is_said(start: str, tmp_path: Path) -> None:
    other = ft.run(ft.FedAvg(steps=1), federation([20, 20], seed=9), out=tmp_path / "other", **OPEN)
    weights = other.shared["model"]
    save_file(dict(weights), tmp_path / "other.safetensors")
    starts = {"run": tmp_path / "other", "file": tmp_path / "other.safetensors", "state": weights}
    run = ft.run(ft.FedAvg(steps=1, opt=private()), federation([20, 20]), start=starts[start], **OPEN)
    assert "epsilon_composed" not in run.summary
    assert any("which was the start, has seen of these rows" in line for line in run.summary["not_counted"])


def test_a_score_that_is_chosen_by_the_rows_is_said() -> None:
    def rare(rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
        draw = np.random.default_rng(rows)
        return [(draw.normal(size=(rows, 3)), (np.arange(rows) == 0).astype(int)) for _ in range(2)]

    fed = ft.Federation.from_arrays(rare(40), rare(30))
    said = [ft.run(ft.FedAvg(opt=private()), fed, score=score, **OPEN).summary["not_counted"] for score in (None, "auc")]
    assert [any("the choice of the score" in line for line in lines) for lines in said] == [True, False]


def test_what_whole_clients_do_not_have_is_said_too() -> None:
    summary = ft.run(ft.FedAvg(steps=1), federation([9] * 4), **CROWD, **OPEN).summary
    assert any("validation and test rows" in line for line in summary["not_counted"])


@pytest.mark.parametrize("options", [{"opt": private()}, CROWD], ids=["rows", "clients"])
def test_settings_that_are_read_off_the_rows_are_refused(options: dict[str, Any]) -> None:
    own, crowd = ({"opt": options["opt"]}, {}) if "opt" in options else ({}, options)
    with pytest.raises(InvalidArgument, match="balanced class weights count the labels"):
        ft.run(ft.FedAvg(**own), federation([20, 20]), class_weights="balanced", **crowd, **OPEN)
    ft.run(ft.FedAvg(steps=1, **own), federation([20, 20]), class_weights=[1.0, 2.0], **crowd, **{**OPEN, "rounds": 1})
    with pytest.raises(InvalidArgument, match="theory's step sizes are read off the clients' rows"):
        ft.run(ft.FedCLUP(lam=0.1, steps="theory", **own), federation([20, 20]), **crowd, **OPEN)


def test_a_delta_that_was_forced_is_called_not_private() -> None:
    summary = ft.run(ft.FedAvg(opt=ft.Private(noise=NOISE, delta=0.5, force=True)), federation([20, 20]), **OPEN).summary
    assert summary["private"] is False
    assert "NOT PRIVATE" in story({"FedAvg": summary})[0]
    assert ft.run(ft.FedAvg(opt=private()), federation([20, 20]), **OPEN).summary["private"] is True


def watches(now: Any) -> None:
    now.keep()


def test_models_that_are_trained_when_looked_at_are_looked_at_once(tmp_path: Path) -> None:
    """Fine-tuning at the end has one noise: a second look, from other models, would have the same noise, which cancels."""
    method, fed = ft.FedAvgFT(steps=1, finetune_steps=1, opt=private()), federation([20, 20])
    with pytest.raises(InvalidArgument, match="leave callbacks out"):
        ft.run(method, fed, callbacks=[watches], **OPEN)
    with pytest.raises(InvalidArgument, match="leave patience out"):
        ft.run(method, with_validation(), patience=2, rounds=3)
    ft.run(method, fed, out=tmp_path / "run", **OPEN)
    with pytest.raises(BadRun, match="cannot be given more"):
        ft.run(method, fed, out=tmp_path / "run", resume=True, **{**OPEN, "rounds": 4})
    plain = ft.Ditto(steps=1, opt=private())
    ft.run(plain, federation([20] * 4), out=tmp_path / "new", new_clients=0.5, **OPEN)
    with pytest.raises(BadRun, match="cannot be given more"):
        ft.run(plain, federation([20] * 4), out=tmp_path / "new", new_clients=0.5, resume=True, **{**OPEN, "rounds": 4})


def test_a_key_that_lay_there_before_is_not_used(tmp_path: Path) -> None:
    """Whoever put it there would know the noise of every round after a resume."""
    key = tmp_path / "run" / NAME
    key.parent.mkdir(parents=True)
    key.write_text("00" * 32 + "\n")
    key.chmod(0o644)
    ft.run(ft.FedAvg(steps=1, opt=private()), federation([20, 20]), out=tmp_path / "run", resume=True, **OPEN)
    assert key.read_text().strip() != "00" * 32
    assert key.stat().st_mode & 0o077 == 0


def test_a_key_that_others_may_read_is_named(tmp_path: Path) -> None:
    def again() -> ft.Run:
        return ft.run(ft.FedAvg(steps=1, opt=private()), federation([20, 20]), out=tmp_path / "run", resume=True, **OPEN)

    first = again()
    (tmp_path / "run" / NAME).chmod(0o644)
    with pytest.warns(UserWarning, match="others may read .*noise.key"):
        assert torch.equal(again().shared["model"]["weight"], first.shared["model"]["weight"])


@pytest.mark.parametrize("options", [{"opt": private()}, CROWD], ids=["rows", "clients"])
def test_the_secret_is_not_sent_to_processes_of_another_engine(options: dict[str, Any]) -> None:
    own, crowd = ({"opt": options["opt"]}, {}) if "opt" in options else ({}, options)
    with pytest.raises(InvalidArgument, match="the secret behind the noise never travels"):
        ft.run(ft.FedAvg(**own), federation([20, 20]), **crowd, **{**OPEN, "engine": "flower"})
