"""What a whole run costs beyond its rounds: evaluating and measuring, tuning nine settings, the start of the command line."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fedtailor as ft
from benchmarks import w1
from fedtailor.engine import run as running
from fedtailor.engine.options import Options
from fedtailor.engine.tune import Trials, candidates, tune

SHARE, RUNS, SECONDS = 0.10, 3.0, 2.5  # of a run that measuring takes; runs that tuning costs; from the start to the first round
MEASURED = ("_judge", "_finished")  # what a run does between its rounds and after them
GRID = {"lr": (0.03, 0.1, 0.3), "lam": (0.01, 0.1, 1.0)}


def row(case: str, figure: str, wanted: str, met: bool, seconds: float | None = None) -> dict[str, Any]:
    ours = None if seconds is None else 1e3 * seconds
    return {"case": case, "ours_ms": ours, "bare_ms": None, "figure": figure, "wanted": wanted, "met": met}


# -- evaluating and measuring ---------------------------------------------------------------------------------------------
@contextlib.contextmanager
def timed(names: tuple[str, ...] = MEASURED) -> Iterator[list[float]]:
    """Collect the seconds that a run spends in these functions of ``engine.run``."""
    seconds: list[float] = []
    kept = {name: getattr(running, name) for name in names}

    def stopwatch(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                seconds.append(time.perf_counter() - began)

        return call

    for name, function in kept.items():
        setattr(running, name, stopwatch(function))
    try:
        yield seconds
    finally:
        for name, function in kept.items():
            setattr(running, name, function)


def pairs(clients: int, rows: int, *shape: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(rows, *shape), torch.randint(10, (rows,))) for _ in range(clients)]


def measuring(goes: int = 3) -> Iterator[dict[str, Any]]:
    """The share of a run that goes into evaluating (about twenty times) and into the measures of the end."""
    torch.manual_seed(0)
    w1_rows = ft.Federation.from_arrays(pairs(w1.CLIENTS, w1.ROWS, w1.D), pairs(w1.CLIENTS, 20, w1.D))
    w2_rows = ft.Federation.from_arrays(pairs(20, 500, 1, 28, 28), pairs(20, 100, 1, 28, 28))
    many = {"rounds": 200, "cohort": w1.COHORT, "batch_size": w1.BATCH, "seed": 1}
    cases: dict[str, Callable[[], Any]] = {
        "W1 FedCLUP, linear, 200 rounds": lambda: ft.run(ft.FedCLUP(lam=0.5, lr=0.05, epochs=5), w1_rows, "linear", **many),
        "W1 FedAvg, MLP 32, 200 rounds": lambda: ft.run(ft.FedAvg(lr=0.05, epochs=5), w1_rows, "mlp:32", **many),
        "W2 Ditto, CNN2, 4 rounds": lambda: ft.run(ft.Ditto(lr=0.05, epochs=1), w2_rows, "cnn2", rounds=4, batch_size=32, seed=1),
    }
    for name, play in cases.items():
        found = []
        for _ in range(1 if name.startswith("W2") else goes):
            with timed() as seconds:
                began = time.perf_counter()
                play()
                found.append((sum(seconds) / (time.perf_counter() - began), sum(seconds)))
        share, spent = statistics.median(share for share, _ in found), statistics.median(spent for _, spent in found)
        yield row(f"Measuring: {name}", f"{share:.1%} of the run", f"below {SHARE:.0%}", share < SHARE, spent)


# -- tuning -----------------------------------------------------------------------------------------------------------------
def tuning(goes: int = 3) -> Iterator[dict[str, Any]]:
    """Nine settings tried on validation rows, against one run with a setting in the middle."""
    federation = ft.Federation.load("digits", clients=20, partition="dirichlet:0.3")
    for method in (ft.FedCLUP(lam=0.1, lr=0.1), ft.Ditto(lam=0.1, lr=0.1)):
        for model in ("linear", "mlp:32"):
            options: dict[str, Any] = {"rounds": 60, "batch_size": 16, "seed": 1, "engine": "vectorized"}
            trials = Trials(federation, model, Options.of(options), GRID)
            assert len(candidates(method, GRID)) == 9
            ratios, spent = [], []
            for _ in range(goes):
                marks = [time.perf_counter()]
                ft.run(method, federation, model, **options)
                marks.append(time.perf_counter())
                tune(method, trials)
                marks.append(time.perf_counter())
                ratios.append((marks[2] - marks[1]) / (marks[1] - marks[0]))
                spent.append(marks[2] - marks[1])
            ratio = statistics.median(ratios)
            name = f"Tuning nine settings: {type(method).__name__}, {model}, 60 rounds of 20 clients"
            yield row(name, f"{ratio:.2f} runs", f"at most {RUNS:g}", ratio <= RUNS, statistics.median(spent))


# -- the start --------------------------------------------------------------------------------------------------------------
def start(goes: int = 5) -> Iterator[dict[str, Any]]:
    """From starting the command to the line of its first round in the history of the run; files are in the disk's cache, and
    modules compiled, as pip does."""
    folder = Path(tempfile.mkdtemp())
    try:
        seconds = statistics.median([_first_round(folder / str(go)) for go in range(goes + 1)][1:])
    finally:
        shutil.rmtree(folder)
    yield row(
        "Start of `fedtailor run fedavg digits` to its first round",
        f"{seconds:.2f} s",
        f"at most {SECONDS:g} s",
        seconds <= SECONDS,
        seconds,
    )


def _first_round(out: Path) -> float:
    began, history = time.perf_counter(), out / "history.jsonl"
    command = [
        sys.executable,
        "-m",
        "fedtailor",
        "run",
        "fedavg",
        "digits",
        "--clients",
        "10",
        "--rounds",
        "20",
        "--out",
        str(out),
    ]
    compiled = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(out.parent / "compiled")}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **compiled})
    try:
        while not (history.exists() and history.stat().st_size):
            if process.poll() is not None:
                raise SystemExit(f"the command ended with {process.returncode} before its first round")
            time.sleep(0.005)
        return time.perf_counter() - began
    finally:
        process.wait()
