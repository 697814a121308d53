"""What the commands say of a method that failed: a row, a reason, exit code 1; and 2 where nothing was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtailor.cli import app

FAILS = ("compare", "digits", "--clients", 4, "--methods", "local,fedavg,ditto", "--set", "fedavg.lr=1e30", "--rounds", 2)
REASON = "diverged in round 0, lr = 1e+30"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_table_has_the_row_and_the_code_is_1():
    result = call(*FAILS, "--out", "a")
    assert result.exit_code == 1, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] in (["Local"], ["Ditto"], ["FedAvg"])]
    assert {row[0] for row in rows[:2]} == {"Local", "Ditto"}
    assert rows[2][0] == "FedAvg"
    assert set(rows[2][1:]) == {"-"}
    assert f"FedAvg failed: {REASON}\n" in result.stdout
    assert "Best on validation, none of them tuned: " in result.stdout
    assert f"failed: {REASON}" in Path("a/report.html").read_text()


def test_json_tells_and_resume_and_report_keep_it():
    result = call(*FAILS, "--out", "a", "--json")
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert values["failed"] == {"FedAvg": REASON}
    assert values["methods"][-1] == {"method": "FedAvg", "failed": REASON}
    again = call("resume", "a", "--json")
    assert again.exit_code == 1, again.stderr
    assert json.loads(again.stdout) == values
    assert call("report", "a", "--to", "b.html").exit_code == 0
    assert f"failed: {REASON}" in Path("b.html").read_text()


def test_a_failed_method_has_no_models():
    call(*FAILS, "--out", "a")
    result = call("export", "a", "--method", "fedavg")
    assert result.exit_code == 2
    assert f"FedAvg failed ({REASON}) and has no models" in result.stderr


def test_nothing_measured_is_an_error():
    result = call(*FAILS[:5], "fedavg,fedprox", "--set", "lr=1e30", "--rounds", 2, "--out", "a")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == f"fedtailor: FedAvg: {REASON}; FedProx: {REASON}"


def test_a_run_that_diverges_is_one_line():
    result = call("run", "digits", "fedavg", "--clients", 4, "--lr", "1e30", "--rounds", 2, "--out", "a")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"fedtailor: training {REASON}: the loss of clients 0, 1, 2, 3 is ")
