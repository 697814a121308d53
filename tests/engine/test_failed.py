"""A method that fails is a row that says why; the others are measured all the same."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

import fedtailor as ft
from fedtailor.errors import CannotWrite, Diverged, InvalidData, NothingMeasured
from fedtailor.report.page import page
from fedtailor.runs.folder import failures_of, read
from tests import make

BAD = 1e30


@dataclass(frozen=True, kw_only=True)
class Broken(ft.FedAvg):
    """Raises what it is told to in a round of one of the seeds."""

    error: str = "TypeError"
    at: int = 1
    seed: int | None = None

    def server_update(self, task, shared, server, upload, rnd):
        if rnd.number == self.at and self.seed in (None, rnd.seed):
            kinds = {
                "TypeError": TypeError("a line\nand another"),
                "InvalidData": InvalidData("client 0 has no rows; give it some"),
                "CannotWrite": CannotWrite("the disk is full"),
                "MemoryError": MemoryError(),
                "RuntimeError": RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory"),
                "KeyError": KeyError(),
            }
            raise kinds[self.error]
        return super().server_update(task, shared, server, upload, rnd)


@pytest.fixture(scope="module")
def clients():
    return make.federation([12, 14, 9], val=True)


def test_one_that_diverges_is_a_row_and_the_others_are_measured(clients, tmp_path):
    comparison = ft.compare([ft.Local(), ft.FedAvg(lr=BAD), ft.Ditto()], clients, rounds=3, out=tmp_path / "a")
    assert list(comparison) == ["Local", "Ditto"]
    assert comparison.failed == {"FedAvg": "diverged in round 0, lr = 1e+30"}
    assert [row["method"] for row in comparison.table()] == ["Local", "Ditto", "FedAvg"]
    assert comparison.table("acc_personal")[-1] == {"method": "FedAvg", "failed": "diverged in round 0, lr = 1e+30"}
    alone = ft.run(ft.Ditto(), clients, rounds=3)
    assert comparison["Ditto"].summary["loss_personal"] == alone.summary["loss_personal"]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["failed"] == comparison.failed == failures_of(tmp_path / "a")
    assert summary["methods"] == {"Local": "local", "Ditto": "ditto"}
    assert summary["table"] == json.loads(json.dumps(comparison.table()))
    assert list(read(tmp_path / "a")) == ["Local", "Ditto"]
    assert "Diverged: training diverged" in (tmp_path / "a" / "runs" / "fedavg" / "error.txt").read_text()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("TypeError", "TypeError: a line"),
        ("KeyError", "KeyError: no message"),
        ("InvalidData", "client 0 has no rows; give it some"),
    ],
)
@pytest.mark.parametrize("at", [0, 1])
def test_other_errors_of_a_method_are_rows_too(error, reason, at, clients, tmp_path):
    comparison = ft.compare([Broken(error=error, at=at), ft.Local()], clients, rounds=3, out=tmp_path / "a")
    assert list(comparison) == ["Local"]
    assert comparison.failed == {"Broken": reason}
    trace = (tmp_path / "a" / "runs" / "broken" / "error.txt").read_text()
    assert "Traceback" in trace
    assert "server_update" in trace


@dataclass(frozen=True, kw_only=True)
class NeverSteps(ft.FedAvg):
    def client_update(self, task, shared, personal, data, rnd):
        raise TypeError("no step")


def test_an_accident_in_the_rehearsal_is_a_row_too(clients):
    assert ft.compare([NeverSteps(), ft.Local()], clients, rounds=1).failed == {"NeverSteps": "TypeError: no step"}


@dataclass(frozen=True, kw_only=True)
class RefusesToPersonalize(ft.FedAvg):
    def personalize(self, task, shared, personal, data):
        raise InvalidData("too few rows to personalise; give more")


def test_a_refusal_in_personalize_is_a_row_too(clients):
    comparison = ft.compare([RefusesToPersonalize(), ft.Local()], clients, rounds=1)
    assert comparison.failed == {"RefusesToPersonalize": "too few rows to personalise; give more"}


def test_an_accident_in_a_worker_process_is_named(clients):
    comparison = ft.compare([NeverInWorkers(), ft.Local()], clients, "mlp:3", rounds=1, engine="loop", workers=2)
    assert comparison.failed["NeverInWorkers"].startswith("RuntimeError: TypeError: never here (in a worker process, client ")


@dataclass(frozen=True, kw_only=True)
class NeverInWorkers(ft.FedAvg):
    def client_update(self, task, shared, personal, data, rnd):
        import multiprocessing

        if multiprocessing.parent_process() is not None:
            raise TypeError("never here")
        return super().client_update(task, shared, personal, data, rnd)


def test_a_method_of_which_one_seed_fails_is_failed_and_says_which(clients):
    comparison = ft.compare([ft.Local(), Broken(seed=6)], clients, rounds=2, seed=5, seeds=3)
    assert comparison.failed == {"Broken": "seed 6: TypeError: a line"}
    assert len(comparison.all["Local"]) == 3


@pytest.mark.parametrize("error", ["CannotWrite", "MemoryError", "RuntimeError"])
def test_what_is_not_the_methods_fault_stops_the_comparison_and_is_tried_again(error, clients, tmp_path):
    with pytest.raises((CannotWrite, MemoryError, RuntimeError)):
        ft.compare([Broken(error=error), ft.Local()], clients, rounds=2, out=tmp_path / "a")
    assert not list(tmp_path.rglob("failed.json"))
    assert not (tmp_path / "a" / "summary.json").exists()


def test_an_error_of_the_callback_is_not_the_methods(clients):
    def stumble(record):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ft.compare([ft.FedAvg(), ft.Local()], clients, rounds=2, callback=stumble)


def test_where_nothing_is_measured_the_error_says_so_of_every_method(clients):
    with pytest.raises(NothingMeasured) as caught:
        ft.compare([Broken(), ft.FedAvg(lr=BAD)], clients, rounds=2)
    assert str(caught.value) == "Broken: TypeError: a line; FedAvg: diverged in round 0, lr = 1e+30"
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(Diverged):
        ft.compare([ft.FedAvg(lr=BAD)], clients, rounds=2)


# -- tuning --------------------------------------------------------------------------------------------------------------


def test_a_method_all_of_whose_trials_diverge_is_failed(clients, tmp_path):
    options = {"rounds": 2, "tune": {"lr": [BAD, 2 * BAD]}, "out": tmp_path / "a"}
    comparison = ft.compare([ft.Local(), ft.FedAvg(lr=BAD)], clients, **options)
    assert comparison.failed == {"FedAvg": "FedAvg diverges with every setting of the grid; give smaller step sizes"}
    assert list(comparison.tuning) == ["Local"]
    assert comparison.tuning["Local"]["chosen"] == {"lr": 0.1}
    seen = []
    again = ft.compare([ft.Local(), ft.FedAvg(lr=BAD)], clients, resume=True, callback=seen.append, **options)
    assert not seen
    assert again.failed == comparison.failed
    assert again.table() == comparison.table()


def test_the_time_of_tuning_is_told_and_counted_once(clients, tmp_path):
    class Stop(Exception):
        pass

    def stop(record):
        if record["label"] == "FedAvg" and record["stage"] == "train":
            raise Stop

    methods, options = [ft.Local(), ft.FedAvg()], {"rounds": 3, "tune": {"lr": [0.1, 0.3]}, "out": tmp_path / "a"}
    with pytest.raises(Stop):
        ft.compare(methods, clients, callback=stop, **options)
    lines = [json.loads(line) for line in (tmp_path / "a" / "timing.jsonl").read_text().splitlines()]
    first = sum(line["seconds"] for line in lines if line["method"] == "FedAvg")
    assert first > 0
    comparison = ft.compare(methods, clients, resume=True, **options)
    rows = {row["method"]: row for row in comparison.table()}
    assert rows["FedAvg"]["tuning_seconds"] == comparison.tuning_seconds["FedAvg"] >= first
    assert comparison.tuning_seconds["FedAvg"] - first < 0.5 * first + 0.5  # its trials are not played again
    assert ft.compare(methods, clients, resume=True, **options).table() == comparison.table()
    assert "tuning (s)" in page(read(tmp_path / "a"))
    assert "tuning_seconds" not in ft.compare(methods, clients, rounds=1).table()[0]


# -- the directory -------------------------------------------------------------------------------------------------------


def test_a_divergence_is_not_tried_again(clients, tmp_path):
    class Stop(Exception):
        pass

    def stop(record):
        if record["label"] == "Local":
            raise Stop

    methods = [ft.FedAvg(lr=BAD), ft.Local()]
    with pytest.raises(Stop):
        ft.compare(methods, clients, rounds=3, out=tmp_path / "a", callback=stop)
    seen = []
    comparison = ft.compare(methods, clients, rounds=3, out=tmp_path / "a", resume=True, callback=seen.append)
    assert {record["label"] for record in seen} == {"Local"}
    assert comparison.failed == {"FedAvg": "diverged in round 0, lr = 1e+30"}
    finished = ft.compare(methods, clients, rounds=3, out=tmp_path / "a", resume=True)
    assert finished.table() == comparison.table()


def test_another_error_is_tried_again_until_the_comparison_is_finished(clients, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stop(record):
        if record["label"] == "Local":
            raise Stop

    methods = [Broken(), ft.Local()]
    with pytest.raises(Stop):
        ft.compare(methods, clients, rounds=3, out=tmp_path / "a", callback=stop)
    assert (tmp_path / "a" / "runs" / "broken" / "failed.json").exists()
    monkeypatch.setattr(Broken, "server_update", ft.FedAvg.server_update)  # it was mended
    comparison = ft.compare(methods, clients, rounds=3, out=tmp_path / "a", resume=True)
    assert not comparison.failed
    assert list(comparison) == ["Broken", "Local"]
    assert not list(tmp_path.rglob("failed.json"))
    assert not list(tmp_path.rglob("error.txt"))


def test_the_report_has_the_row_and_the_words(clients):
    comparison = ft.compare([ft.Local(), ft.FedAvg(lr=BAD), Broken()], clients, rounds=2)
    html = page(comparison.records(), failed={**comparison.failed, "Broken": "<b>&"})
    assert "failed: diverged in round 0, lr = 1e+30</td>" in html
    assert (
        "neither measured nor compared: <b>FedAvg</b> (diverged in round 0, lr = 1e+30); <b>Broken</b> (&lt;b&gt;&amp;)" in html
    )
    assert "failed" not in page(comparison.records()).lower().partition("what the columns mean")[0]
