"""Callbacks, patience, and runs that are given more rounds or methods."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor import tree
from fedtailor.cli import app
from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.runs.contents import open_contents
from fedtailor.runs.record import read
from tests.make import federation

DATA = federation((7, 5, 9, 6), val=True)
SETTINGS = {"workers": 1, "engine": "loop", "batch_size": 4, "evaluate_every": 1}


def equal(a, b):
    return tree.shapes(a) == tree.shapes(b) and all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


def stop_after_three(now):
    return len(now.history) == 3


class Counting:
    """Ends the run when it has been told of five rounds: it has a state."""

    def __init__(self):
        self.told = 0

    def __call__(self, now):
        self.told += 1
        return "five were enough" if self.told == 5 else None


def keep_the_second(now):
    if now.record["round"] == 1:
        now.keep()


class Stop(Exception):
    pass


def test_a_callback_may_end_the_run_and_then_it_is_the_run_of_so_many_rounds(tmp_path):
    whole = ft.run(ft.Ditto(), DATA, rounds=3, **SETTINGS)
    ended = ft.run(ft.Ditto(), DATA, rounds=9, callbacks=[stop_after_three], out=tmp_path / "a", **SETTINGS)
    assert equal(whole.shared, ended.shared)
    assert ended.summary["rounds"] == len(ended.history) == 3
    assert ended.summary["stopped"] == "stop_after_three asked for it"
    assert ended.summary["acc_personal"] == whole.summary["acc_personal"]
    assert any("ended after 3 of 9 rounds" in note for note in ended.summary["notes"])
    assert read(open_contents(tmp_path / "a")).summary == ended.summary
    again = ft.run(ft.Ditto(), DATA, rounds=9, callbacks=[stop_after_three], out=tmp_path / "a", resume=True, **SETTINGS)
    assert again.summary == ended.summary
    with pytest.raises(BadRun, match="ended by itself"):
        ft.run(ft.Ditto(), DATA, rounds=12, callbacks=[stop_after_three], out=tmp_path / "a", resume=True, **SETTINGS)
    with pytest.raises(BadRun, match="callbacks="):
        ft.run(ft.Ditto(), DATA, rounds=9, out=tmp_path / "a", resume=True, **SETTINGS)


def test_the_round_that_is_kept_is_what_the_run_ends_with(tmp_path):
    early = ft.run(ft.Ditto(), DATA, rounds=2, **SETTINGS)
    kept = ft.run(ft.Ditto(), DATA, rounds=5, callbacks=[keep_the_second], out=tmp_path / "a", **SETTINGS)
    assert equal(early.shared, kept.shared)
    assert equal(early.store.dump(), kept.store.dump())
    assert kept.summary["kept_round"] == 1
    assert kept.summary["rounds"] == len(kept.history) == 5
    for key in ("acc_personal", "loss_personal", "f1_personal", "acc_global_test"):
        assert kept.summary[key] == early.summary[key], key
    np.testing.assert_array_equal(kept.clients["acc_personal"], early.clients["acc_personal"])
    again = ft.run(ft.Ditto(), DATA, rounds=5, callbacks=[keep_the_second], out=tmp_path / "a", resume=True, **SETTINGS)
    assert equal(early.shared, again.shared)
    record = read(open_contents(tmp_path / "a"))
    np.testing.assert_array_equal(record.clients["f1_personal"], early.clients["f1_personal"])


def test_patience_ends_with_the_round_that_is_best_on_validation():
    whole = ft.run(ft.FedAvg(lr=0.5), DATA, rounds=30, **SETTINGS)
    scores = [record["val_acc_personal"] for record in whole.history]
    best = 0  # by hand: the first round that no later one within three beats
    for number, score in enumerate(scores):
        if score > scores[best]:
            best = number
        if number - best >= 3:
            break
    assert number < 29
    patient = ft.run(ft.FedAvg(lr=0.5), DATA, rounds=30, patience=3, **SETTINGS)
    assert patient.summary["kept_round"] == patient.summary["best_round"] == best
    assert patient.summary["rounds"] == number + 1
    assert patient.summary["acc_personal"] == whole.history[best]["acc_personal"]


def test_patience_goes_by_the_score_that_was_asked_for():
    """Before: by accuracy, whatever the run was judged by."""
    whole = ft.run(ft.FedAvg(lr=0.5), DATA, rounds=30, score="log_loss", **SETTINGS)
    losses = [record["val_log_loss_personal"] for record in whole.history]
    best = 0
    for number, loss in enumerate(losses):
        best = number if loss < losses[best] else best
        if number - best >= 3:
            break
    patient = ft.run(ft.FedAvg(lr=0.5), DATA, rounds=30, score="log_loss", patience=3, **SETTINGS)
    assert patient.summary["kept_round"] == patient.summary["best_round"] == best
    assert patient.summary["rounds"] == number + 1


def test_patience_needs_validation():
    with pytest.raises(InvalidArgument, match="no validation rows"):
        ft.run(ft.FedAvg(), federation((5, 6)), rounds=2, patience=1)
    with pytest.raises(InvalidArgument, match="evaluate_every"):
        ft.run(ft.FedAvg(), DATA, rounds=2, patience=1, evaluate_every=0)


@pytest.mark.parametrize("settings", [{"callbacks": [Counting, keep_the_second]}, {"patience": 2}], ids=["class", "patience"])
def test_what_callbacks_remember_is_the_same_when_a_run_goes_on(settings, tmp_path):
    options = {**SETTINGS, **settings, "rounds": 12, "checkpoint_every": 1}
    method = ft.FedAvg(lr=0.5)
    whole = ft.run(method, DATA, out=tmp_path / "a", **options)
    at = whole.summary["rounds"] - 2

    def stop(record):
        if record["round"] == at:
            raise Stop

    with pytest.raises(Stop):
        ft.run(method, DATA, out=tmp_path / "b", callback=stop, **options)
    again = ft.run(method, DATA, out=tmp_path / "b", resume=True, **options)
    assert {**again.summary, "seconds": 0} == {**whole.summary, "seconds": 0}
    assert (tmp_path / "a/history.jsonl").read_bytes() == (tmp_path / "b/history.jsonl").read_bytes()
    assert equal(whole.shared, again.shared)


def test_a_callback_sees_the_models_and_a_bad_one_is_named():
    seen = []

    def look(now):
        seen.append((now.record["round"], equal(now.shared["model"], now.personal("0")["model"]), now.rounds))

    ft.run(ft.Ditto(), DATA, rounds=2, callbacks=[look], **SETTINGS)
    assert seen == [(0, False, 2), (1, False, 2)]
    for bad, says in ((lambda now: 3, "gives 3"), (lambda now: 1 / 0, "fails after round 0 .ZeroDivisionError")):
        with pytest.raises(InvalidArgument, match=says):
            ft.run(ft.Ditto(), DATA, rounds=2, callbacks=[bad], **SETTINGS)


# -- more rounds --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [ft.Ditto(), ft.Scaffold(), ft.FedAdam()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_run_that_is_given_more_rounds_is_the_run_of_so_many_rounds(method, every, tmp_path):
    options = {**SETTINGS, "evaluate_every": every, "cohort": 0.5}
    whole = ft.run(method, DATA, rounds=7, out=tmp_path / "a", **options)
    ft.run(method, DATA, rounds=4, out=tmp_path / "b", **options)
    longer = ft.run(method, DATA, rounds=7, out=tmp_path / "b", resume=True, **options)
    for name in ("history.jsonl", "models/shared.safetensors", "models/personal.safetensors", "config.toml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert {**longer.summary, "seconds": 0} == {**whole.summary, "seconds": 0}
    with pytest.raises(BadRun, match="rounds=7, not 5"):
        ft.run(method, DATA, rounds=5, out=tmp_path / "b", resume=True, **options)


def test_evaluations_stay_as_far_apart_as_they_were(tmp_path):
    options = {**SETTINGS, "evaluate_every": None}
    ft.run(ft.FedAvg(), DATA, rounds=40, out=tmp_path / "b", **options)
    ft.run(ft.FedAvg(), DATA, rounds=60, out=tmp_path / "b", resume=True, **options)
    again = ft.run(ft.FedAvg(), DATA, rounds=60, out=tmp_path / "b", resume=True, **options)
    assert [r["round"] for r in again.history if "acc_personal" in r] == list(range(1, 60, 2))


@dataclass(frozen=True, kw_only=True)
class Fading(ft.FedAvg):
    """Its step falls to zero at the last round."""

    def client_update(self, task, shared, personal, data, rnd):
        v = ft.descend(task.risk, shared["model"], data, self.optimizer(rnd, lr=0.1 * (1 - rnd.number / rnd.rounds)))
        return {"delta": tree.sub(v, shared["model"])}, {}


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (Fading(), r"Fading looks at the number of rounds"),
        (ft.FedAvg(opt=ft.Private(target_epsilon=5.0, clip=1.0, seed=0)), "FedAvg's opt depends on the number of rounds"),
    ],
    ids=["own", "epsilon"],
)
def test_a_method_that_depends_on_the_number_of_rounds_is_not_given_more(method, says, tmp_path):
    options = {"workers": 1, "engine": "loop", "out": tmp_path / "a", "evaluate_every": 1}
    ft.run(method, DATA, rounds=2, **options)
    before = {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    with pytest.raises(BadRun, match=says):
        ft.run(method, DATA, rounds=4, resume=True, **options)
    assert {p: p.read_bytes() for p in (tmp_path / "a").rglob("*") if p.is_file()} == before


SOURCE = """
class Watch:
    rounds = 0

    def __call__(self, now):
        self.rounds += 1
        return self.rounds == 4


watch = Watch()
"""
WORDS = ["clup-logistic", "--clients", "4", "--engine", "loop", "--workers", "1"]


def told(*words):
    said = CliRunner().invoke(app, list(words))
    return said.exit_code, " ".join(said.output.split())


def test_more_rounds_and_callbacks_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    assert (
        told("run", "fedavg", *WORDS, "--rounds", "2", "--out", "a", "--callbacks", "mine.py:Watch", "--evaluate-every", "1")[0]
        == 0
    )
    assert told("resume", "a", "--rounds", "9")[0] == 0
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    assert (summary["rounds"], summary["stopped"]) == (4, "Watch asked for it")
    assert told("run", "fedavg", *WORDS, "--rounds", "3", "--out", "b", "--callbacks", "mine.py:watch")[0] == 0
    assert told("resume", "b")[0] == 0
    code, words = told("resume", "a", "--add", "ditto")
    assert code == 2
    assert "no method can be added" in words


def test_a_method_is_added_to_a_finished_comparison_and_the_others_are_read_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert told("compare", *WORDS, "--methods", "local,fedavg", "--rounds", "2", "--seeds", "2", "--out", "a")[0] == 0
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "a/runs").rglob("*.safetensors")}
    assert told("resume", "a", "--add", "ditto", "--set", "ditto.lam=0.7")[0] == 0
    assert {p: p.stat().st_mtime_ns for p in times} == times
    assert (
        told(
            "compare",
            *WORDS,
            "--methods",
            "local,fedavg,ditto",
            "--set",
            "ditto.lam=0.7",
            "--rounds",
            "2",
            "--seeds",
            "2",
            "--out",
            "b",
        )[0]
        == 0
    )
    tables = [json.loads((tmp_path / d / "summary.json").read_text())["table"] for d in "ab"]
    for one, other in zip(*tables, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    code, words = told("resume", "a", "--add", "ditto")
    assert code == 2
    assert "given twice" in words
    assert told("resume", "a", "--rounds", "3")[0] == 0
    assert {len((tmp_path / "a/runs" / m / "seed-1/timing.jsonl").read_text().splitlines()) for m in ("local", "ditto")} == {3}
