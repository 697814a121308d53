"""Killed without warning at random moments, every command goes on to the same history, summary and models, bit by bit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.commands import Command

DIGITS, LINEAR = ("digits", "--clients", 6), ("clup-regression", "--clients", 4)
COMMANDS = {
    "run": (
        "run",
        *DIGITS,
        "--method",
        "ditto",
        "--rounds",
        40,
        "--evaluate-every",
        4,
        "--checkpoint-every",
        3,
        "--new-clients",
        0.2,
    ),
    "workers": (
        *("run", *DIGITS, "--method", "scaffold", "--model", "mlp", "--engine", "loop", "--workers", 2),
        *("--rounds", 12, "--evaluate-every", 4, "--checkpoint-every", 2),
    ),
    "compare": (
        *("compare", *DIGITS, "--methods", "local,fedavg,ditto", "--set", "fedavg.lr=1e30", "--seeds", 2),
        *("--rounds", 12, "--evaluate-every", 3, "--checkpoint-every", 4),
    ),
    "tune": (
        *("compare", *DIGITS, "--methods", "local,ditto", "--tune", "--grid", "lr=0.1,0.3,0.6", "--rounds", 9),
        *("--evaluate-every", 3, "--checkpoint-every", 4),
    ),
    "sweep": ("sweep", *LINEAR, "--rounds", 30, "--lams", 5),
    "advise": ("advise", *LINEAR, "--rounds", 12),
    "pretrain": (
        "pretrain",
        "digits",
        "--with",
        "images=true",
        "--clients",
        2,
        "--model",
        "resnet8",
        "--epochs",
        2,
        "--batch-size",
        256,
    ),
}
CODES = {"compare": 1}  # in which a method diverges
TIMES = ("seconds", "tuning_seconds")
EXACT = (
    "*.safetensors",
    "advice.json",
    "failed.json",
    "history.jsonl",
    "identity.json",
    "report.html",
    "sweep.json",
    "tuning/*.json",
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def timeless(value):
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in TIMES}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def result(command, out):
    """What a command has left, without what depends on the clock: checkpoints, times, and the report of a run."""
    if command == "pretrain":
        return out.read_bytes() if out.exists() else None
    patterns = EXACT if command in ("sweep", "advise") else [name for name in EXACT if name != "report.html"]
    paths = [path for pattern in patterns for path in out.rglob(pattern) if not path.name.startswith("round-")]
    left = {path.relative_to(out): path.read_bytes() for path in paths}
    return left | {p.relative_to(out): timeless(json.loads(p.read_text())) for p in out.rglob("summary.json")}


def words(command, name):
    """(the command that begins, the command that goes on, what they write)."""
    out = Path(f"{name}.safetensors" if command == "pretrain" else name)
    begin = (*COMMANDS[command], "--out", out)
    resumable = command not in ("sweep", "advise", "pretrain") and (out / "config.toml").exists()
    return begin, ("resume", out) if resumable else begin, out


def undisturbed(command):
    """(what the command leaves, the seconds that it takes, the rounds that it plays)."""
    begin, _, out = words(command, "whole")
    began = time.perf_counter()
    code, _, err = Command(
        *begin, on_round=lambda: os.write(os.open("rounds", os.O_WRONLY | os.O_CREAT | os.O_APPEND), b".")
    ).wait()
    assert code == CODES.get(command, 0), err
    assert result(command, out)
    return result(command, out), time.perf_counter() - began, len(Path("rounds").read_bytes())


def assert_ends_like(whole, command, name):
    """What was killed has left nothing that is not whole, and goes on to the same end."""
    _, go_on, out = words(command, name)
    if command == "pretrain":
        assert result(command, out) in (None, whole)
    elif command in ("sweep", "advise"):
        assert result(command, out).items() <= whole.items()
    code, _, err = Command(*go_on).wait()
    assert code == CODES.get(command, 0), err
    assert result(command, out) == whole


def dying(rounds, delay):
    """A callback that ends its process, with no chance to tidy up, some seconds after so many rounds."""
    left = iter(range(rounds - 1, -1, -1))
    return lambda: signal.setitimer(signal.ITIMER_REAL, delay) if next(left, 1) == 0 else None


@pytest.mark.parametrize("command", COMMANDS)
def test_killed_in_a_random_round_it_ends_the_same(command):
    whole, _, rounds = undisturbed(command)
    draw = np.random.default_rng(len(command))
    process = Command(*words(command, "cut")[0], on_round=dying(draw.integers(1, rounds), draw.uniform(1e-6, 0.02)))
    assert process.wait()[0] == -signal.SIGALRM
    assert_ends_like(whole, command, "cut")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "kills"),
    [("run", 20), ("workers", 15), ("compare", 20), ("tune", 15), ("sweep", 10), ("advise", 10), ("pretrain", 10)],
)
def test_a_hundred_kills(command, kills):
    """At any moment from start to end, every third directory twice; one that comes too late does not count."""
    whole, seconds, _ = undisturbed(command)
    draw = np.random.default_rng(kills)
    hits = 0
    for i in range(4 * kills):
        for _ in range(2 if i % 3 == 2 else 1):
            process = Command(*words(command, f"cut-{i}")[1])
            time.sleep(draw.uniform(0, seconds))
            hits += process.kill()
        assert_ends_like(whole, command, f"cut-{i}")
        if hits >= kills:
            return
    raise AssertionError(f"{hits} of {kills} kills came before the end")
