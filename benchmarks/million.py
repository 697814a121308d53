"""A million clients: seconds and memory of a run that is kept, of one that is killed and goes on, and of finding a model.

``python -m benchmarks.million`` runs each in a process of its own and writes docs/results/million.md; ``--clients`` takes fewer,
``--part whole --folder DIR`` runs one step (in order: whole, killed, resumed, found) and keeps what it came to.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from benchmarks.kept import keep
from benchmarks.scale import peak_kilobytes
from fedtailor.data.federation import Federation
from fedtailor.runs import models

PAGE = Path("docs/results/million.md")
CLIENTS, ROWS, FEATURES, COHORT, ROUNDS, SAMPLE = 1_000_000, 2, 20, 1000, 50, 1000
EVERY = 10  # rounds between evaluations of the sample, and between checkpoints of the run that is killed
KILLED = 35  # the round after which it is
LOOKUPS = 2000
SECONDS, GIGABYTES, MILLISECONDS = 180.0, 3.0, 1.0  # the targets
Measured = dict[str, Any]


def federation(clients: int) -> Federation:
    """Clients whose labels follow one direction, and a little of their own."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((clients, 2 * ROWS, FEATURES), dtype=np.float32)
    own = draw.standard_normal((clients, 1, 4), dtype=np.float32)
    y = ((x @ draw.standard_normal(FEATURES, dtype=np.float32)) + (x[:, :, :4] * own).sum(2) > 0).astype(np.int64)
    train = [(x[i, :ROWS], y[i, :ROWS]) for i in range(clients)]
    test = [(x[i, ROWS:], y[i, ROWS:]) for i in range(clients)]
    return Federation.from_arrays(train, test, name="a million clients")


def trained(clients: int, out: Path, **more: Any) -> Any:
    settings = {"rounds": ROUNDS, "cohort": COHORT, "evaluate_every": EVERY, "evaluate_clients": SAMPLE, "seed": 1}
    return ft.run(ft.FedCLUP(lam=0.1, lr=0.1), federation(clients), "linear", out=out, **settings, **more)


def whole(clients: int, folder: Path) -> Measured:
    run = trained(clients, folder / "whole")
    size = sum(path.stat().st_size for path in (folder / "whole").rglob("*") if path.is_file())
    return {"accuracy": run.summary["acc_personal"], "shared": run.summary["acc_global"], "bytes": size}


def killed(clients: int, folder: Path) -> Measured:
    def kill(record: dict[str, Any]) -> None:
        if record["round"] == KILLED:
            print(json.dumps({}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    return dict(trained(clients, folder / "killed", checkpoint_every=EVERY, callback=kill).summary)


def resumed(clients: int, folder: Path) -> Measured:
    parts = sum(path.stat().st_size for path in (folder / "killed" / "checkpoints").iterdir())
    trained(clients, folder / "killed", checkpoint_every=EVERY, resume=True)
    names = sorted(path.relative_to(folder / "whole") for path in (folder / "whole").rglob("*.safetensors"))
    names = [name for name in names if name.name != "round-0000000.safetensors" and not name.name.startswith("store-")]
    last = [name for name in names if (folder / "killed" / name).exists()]
    same = all((folder / "whole" / name).read_bytes() == (folder / "killed" / name).read_bytes() for name in last)
    history = [(folder / run / "history.jsonl").read_bytes() for run in ("whole", "killed")]
    return {"same": same and history[0] == history[1], "compared": len(last) + 1, "parts": parts}


def found(clients: int, folder: Path) -> Measured:
    """Find clients in a fresh process: the first ones touch blocks that nobody has checked yet."""
    began = time.perf_counter()
    saved = models.read(folder / "whole")
    opened = time.perf_counter() - began
    draw, x = np.random.default_rng(1), torch.zeros(1, FEATURES)
    names = [str(i) for i in draw.integers(clients, size=LOOKUPS)]
    times = [_seconds(lambda name=name: saved.of(name)) for name in names]  # type: ignore[misc]
    predicted = [_seconds(lambda name=name: saved.predict(name, x)) for name in names]  # type: ignore[misc]
    return {
        "opened": opened,
        "first": times[0] * 1e3,
        "median": statistics.median(times) * 1e3,
        "most": float(np.quantile(times, 0.99)) * 1e3,
        "predicted": statistics.median(predicted) * 1e3,
    }


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


STEPS = {"whole": whole, "killed": killed, "resumed": resumed, "found": found}


def alone(step: str, clients: int, folder: Path) -> Measured:
    """Run a step in a process of its own; its wall and CPU time and its peak memory are those of the whole process."""
    began, before = time.perf_counter(), os.times()
    command = [sys.executable, "-m", "benchmarks.million", "--step", step, "--clients", str(clients), "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    wanted = -signal.SIGKILL if step == "killed" else 0
    if done.returncode != wanted:
        raise SystemExit(f"{step} ended with {done.returncode}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": time.perf_counter() - began, "cpu": cpu, **json.loads(done.stdout.splitlines()[-1])}


def page(clients: int, seen: dict[str, Measured]) -> str:
    """What was measured, beside the targets."""
    run, again, look = seen["whole"], seen["resumed"], seen["found"]
    wall, cpu = run["wall"] + again["wall"], run["cpu"] + again["cpu"]
    memory = max(run["peak"], again["peak"])
    rows = [
        ("run and resume, seconds", f"{wall:.0f} (CPU {cpu:.0f})", f"under {SECONDS:.0f}", cpu < SECONDS),
        ("peak memory, GB", f"{memory:.2f}", f"under {GIGABYTES:.0f}", memory < GIGABYTES),
        ("a client's model found, ms", f"{look['median']:.3f}", f"under {MILLISECONDS:.0f}", look["median"] < MILLISECONDS),
        ("killed and resumed, the same bytes", "yes" if again["same"] else "no", "yes", again["same"]),
    ]
    lines = [
        "# A million clients",
        "",
        "Written by `make bench-million`.",
        "",
        f"{clients:,} clients with {ROWS} training and {ROWS} test rows of {FEATURES} features, FedCLUP on a linear model, "
        f"{COHORT:,} clients a round, {ROUNDS} rounds with a run directory. Every {EVERY} rounds a sample of {SAMPLE:,} clients "
        "is measured, at the end all of them. Every step is a process of its own: wall and CPU seconds are those of the whole "
        "process, from starting Python and making the data to its end. Other work on the machine lengthens wall time, so both "
        "are shown, and it is the CPU time that is held against the target.",
        "",
        "| | measured | target | |",
        "|---|---|---|---|",
        *(f"| {name} | {value} | {target} | {'met' if met else 'not met'} |" for name, value, target, met in rows),
        "",
        "| process | wall s | CPU s | peak GB |",
        "|---|---|---|---|",
        *(
            f"| {name} | {seen[step]['wall']:.1f} | {seen[step]['cpu']:.1f} | {_gigabytes(seen[step])} |"
            for step, name in (
                ("whole", "the run"),
                ("killed", f"the same, killed (SIGKILL) after round {KILLED}"),
                ("resumed", "which goes on to the end"),
                ("found", f"finds {LOOKUPS:,} clients' models"),
            )
        ),
        "",
        f"The run directory takes {run['bytes'] / 1e6:.0f} MB; the checkpoints of the killed run took "
        f"{again['parts'] / 1e6:.1f} MB. Of the two runs {again['compared']} files (history, models, measures, last checkpoint) "
        "were compared byte by byte.",
        "",
        f"The models are opened in {look['opened']:.2f} s (the index of names is read and checked); then the first is found in "
        f"{look['first']:.2f} ms, the median of {LOOKUPS:,} in {look['median']:.3f} ms, 99 in 100 within {look['most']:.2f} ms, "
        "each from a block that is checked against its digest when it is first touched. A prediction takes "
        f"{look['predicted']:.3f} ms.",
        "",
        f"Accuracy at the end, all clients: {run['accuracy']:.4f} personal, {run['shared']:.4f} shared.",
        "",
    ]
    return "\n".join(lines)


def _gigabytes(measured: Measured) -> str:
    return f"{measured['peak']:.2f}" if "peak" in measured else "not known"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--step", choices=STEPS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--part", action="append", choices=STEPS, help="measure these steps only, in the folder given by --folder"
    )
    parser.add_argument("--to", type=Path, default=PAGE)
    asked = parser.parse_args()
    if asked.step:
        measured = STEPS[asked.step](asked.clients, asked.folder)
        print(json.dumps({**measured, "peak": peak_kilobytes() * 1024 / 1e9}))
        return
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="million-"))
    try:
        for step in asked.part or STEPS:
            seen = keep("million", step, alone(step, asked.clients, folder))
            print(step, seen[step], flush=True)
        if set(seen) >= set(STEPS):
            asked.to.write_text(page(asked.clients, seen), encoding="utf-8")
    finally:
        if asked.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
