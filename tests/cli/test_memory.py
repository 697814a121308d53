"""Where memory or processes would run out, a command says so in one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli import app, train
from fedtailor.engine import loop
from tests.make import federation


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def too_much_for_numpy():
    np.empty(1 << 60, np.int8)


def too_much_for_torch():
    torch.empty(1 << 60, dtype=torch.int8)


def too_deep():
    too_deep()


@pytest.mark.parametrize(
    ("accident", "says"),
    [(too_much_for_numpy, "not enough memory"), (too_much_for_torch, "not enough memory"), (too_deep, "nested too deeply")],
)
def test_no_memory_is_one_line(accident, says, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "tell_about", lambda federation: accident())
    result = call("run", "digits", "--clients", 2, "--rounds", 1, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_another_error_keeps_its_traceback(monkeypatch, tmp_path):
    def bug(federation):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(train, "tell_about", bug)
    assert isinstance(call("run", "digits", "--out", tmp_path / "run").exception, RuntimeError)


def test_workers_are_capped_by_cores_and_it_is_said(monkeypatch):
    monkeypatch.setattr(loop, "cores", lambda: 1)
    clients = federation([6] * 20)
    with pytest.warns(UserWarning, match=r"workers=100000 are more than 1 cores can serve; 8 are started"):
        run = ft.run(ft.FedAvg(), clients, rounds=1, engine="loop", workers=100_000)
    assert run.summary["workers"] == 8


def test_workers_are_no_more_than_the_clients():
    run = ft.run(ft.FedAvg(), federation([6] * 3), rounds=1, engine="loop", workers=5)
    assert run.summary["workers"] == 3
