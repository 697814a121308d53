"""``make bench-peers``: the same FedAvg here, in bare PyTorch and in Flower's simulation; writes docs/results/peers.md.

Each way is a process of its own, told apart by a mark in its environment, which all processes it starts inherit: their CPU time
and memory are read from /proc while they run (Linux). The ways take turns; medians of three goes. Accuracies must agree within
noise, or nothing is written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept import keep
from benchmarks.peer_ways import BATCH, LR, ROUNDS, WAYS
from fedtailor.data.readers.files import read_idx

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "peers.md"
MARK = "FEDTAILOR_PEER"
NOISE = 3.0  # standard errors of an accuracy on the test rows, within which all ways must agree, and
DRAWN = 0.01  # what other batches may change in the model
LIMIT = 900  # seconds for a go
NAMES = {"here": "fedtailor", "bare": "bare PyTorch, one process", "flower": "Flower's simulation"}
CASES = {
    "table": "a made-up table like HAR's, 30 clients x 240 rows of 561 features, 6 classes; an MLP with 64 hidden units",
    "images": "MNIST, 20 clients x 300 digits with skewed labels; a CNN with two convolutions of 16 and 32 channels",
}
Figures = dict[str, float]
Rows = dict[str, np.ndarray]


def table(clients: int = 30, train: int = 240, test: int = 100) -> Rows:
    """Clients who do the same six things, each in a way of their own."""
    draw = np.random.default_rng(0)
    kinds, habits = draw.normal(size=(6, 561)), draw.normal(size=(clients, 561))
    y = draw.integers(0, 6, (clients, train + test))
    x = 0.25 * kinds[y] + 0.5 * habits[:, None] + 2 * draw.normal(size=(*y.shape, 561))
    return parted(x.astype(np.float32), y, train)


def images(folder: Path, clients: int = 20, train: int = 300, test: int = 100) -> Rows:
    """MNIST's digits, each client with frequencies of its own; no digit is dealt twice."""
    ending = "-ubyte.gz" if (folder / "train-images-idx3-ubyte.gz").exists() else "-ubyte"
    x, y = (read_idx(folder / f"train-{part}{ending}") for part in ("images-idx3", "labels-idx1"))
    draw = np.random.default_rng(0)
    left = [list(draw.permutation(np.flatnonzero(y == digit))) for digit in range(10)]
    wanted = [draw.choice(10, train + test, p=draw.dirichlet(np.ones(10))) for _ in range(clients)]
    rows = np.array([[left[digit].pop() for digit in labels] for labels in wanted])
    return parted((x[rows] / 255).astype(np.float32)[:, :, None], y[rows].astype(np.int64), train)


def parted(x: np.ndarray, y: np.ndarray, train: int) -> Rows:
    return {"train_x": x[:, :train], "train_y": y[:, :train], "test_x": x[:, train:], "test_y": y[:, train:]}


def marked(mark: str) -> dict[int, tuple[float, float]]:
    """CPU seconds and resident megabytes of all processes with the mark; what they share is counted once for each."""
    found, tick, page = {}, os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = (sum(map(int, fields[11:13])) / tick, int(fields[21]) * page / 2**20)
        except (OSError, ValueError):
            continue  # it has ended, or is not ours
    return found


def go(way: str, case: str, rows: Path) -> Figures:
    """Run one way once."""
    mark, out = uuid.uuid4().hex, rows.with_name("out.json")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    found = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        **quiet,
        MARK: mark,
        "PYTHONPATH": found,
        "OMP_NUM_THREADS": "1",
        "FLWR_HOME": str(rows.with_name("flwr")),
    }
    command = [sys.executable, "-m", "benchmarks.peer_ways", way, case, str(rows), str(out)]
    cpu: dict[int, float] = {}
    most, began = 0.0, time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        seen = marked(mark)
        cpu |= {pid: seconds for pid, (seconds, _) in seen.items()}
        most = max(most, sum(size for _, size in seen.values()))
        if time.perf_counter() - began > LIMIT:
            process.kill()
        time.sleep(0.1)
    if process.returncode:
        assert process.stderr is not None
        raise SystemExit(f"{way} on {case} failed:\n{process.stderr.read().decode()[-2000:]}")
    wall = time.perf_counter() - began
    return {"wall": wall, "cpu": sum(cpu.values()), "memory": most, **json.loads(out.read_text())}


def race(case: str, rows: Path, goes: int) -> dict[str, Figures]:
    """Every way's medians; refused where accuracies differ by more than chance."""
    each: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for _ in range(goes):
        for way, done in each.items():
            done.append(go(way, case, rows))
            print(case, way, done[-1], flush=True)
    medians = {way: {name: statistics.median(one[name] for one in done) for name in done[0]} for way, done in each.items()}
    with np.load(rows) as file:
        count = file["test_y"].size
    scores = [one["accuracy"] for one in medians.values()]
    middle = float(np.mean(scores))
    allowed = NOISE * float(np.sqrt(2 * middle * (1 - middle) / count)) + DRAWN
    assert max(scores) - min(scores) <= allowed, f"{case}: accuracies {scores} differ by more than {allowed:.3f}"
    return medians


def section(case: str, medians: dict[str, Figures]) -> str:
    lines = [f"## {CASES[case][0].upper()}{CASES[case][1:]}", ""]
    lines += [f"{ROUNDS[case]} rounds of all clients, one epoch each, batches of {BATCH}, step size {LR[case]}.", ""]
    lines += ["| | accuracy | wall, s | of it training, s | CPU, s | memory, MB |", "|---|---|---|---|---|---|"]
    for way, one in medians.items():
        times = " | ".join(f"{one[name]:.1f}" for name in ("wall", "training", "cpu"))
        lines.append(f"| {NAMES[way]} | {one['accuracy']:.4f} | {times} | {one['memory']:,.0f} |")
    return "\n".join(lines)


HEAD = """# The same experiment elsewhere

Written by `make bench-peers`: FedAvg from the same start on the same rows, here, in bare PyTorch and in Flower's simulation,
each in processes of its own, turn about; goes: {goes}, of which the medians are shown. The accuracy is that of the last shared
model on all clients' test rows, and must agree within noise, or the page is not written: each way draws batches in an order of
its own. Wall and CPU time are of all processes from start to end, imports included; training is `ft.run`, the loop, or
`run_simulation` alone. Memory is the largest sum of what the processes have resident, in which pages that they share count for
each. A process has one thread; Flower and fedtailor may use all cores.
"""
TAIL = """
PFLlib and FL-bench: not tried; they are not packages and come with data sets of their own, so a runner needs a checkout to be
written against.

Machine: {machine}, {cores} cores.
"""


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--case", action="append", choices=CASES, help="measure this case only; the other's figures are kept")
    flags.add_argument("--goes", type=int, default=3)
    flags.add_argument("--data", type=Path, default=Path(os.environ.get("FEDTAILOR_DATA", "../shared/data")))
    asked = flags.parse_args()
    makers = {"table": table, "images": lambda: images(asked.data / "mnist")}
    with tempfile.TemporaryDirectory() as folder:
        for case in asked.case or CASES:
            rows = Path(folder) / f"{case}.npz"
            np.savez(rows, **makers[case]())
            found = keep("peers", case, {"goes": asked.goes, "medians": race(case, rows, asked.goes)})
    PAGE.write_text(page(found))


def page(found: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    sections = [section(case, found[case]["medians"]) if case in found else f"Not measured yet: {CASES[case]}." for case in CASES]
    head = HEAD.format(goes=", ".join(str(found[case]["goes"]) for case in CASES if case in found))
    return "\n".join([head, *("\n".join([part, ""]) for part in sections)]) + TAIL.format(
        machine=platform.machine(), cores=os.cpu_count()
    )


if __name__ == "__main__":
    main()
