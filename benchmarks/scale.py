"""Scale: clients x 20 rows of synthetic logistic data, 1,000 a round, FedCLUP with personal state: peak memory, and the time of
a round as the number of clients grows. Each size runs in a process of its own, so that peaks do not mix."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

ROWS, D, COHORT, ROUNDS = 20, 10, 1000, 10


def peak_kilobytes() -> int:
    """Peak of this process alone (getrusage starts a child at its parent's peak)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def one_size(clients: int) -> dict[str, float]:
    import torch

    import fedtailor as ft
    from benchmarks.players import Player
    from fedtailor.data.split import Split
    from fedtailor.engine.vectorized import VectorizedEngine

    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((clients * ROWS, D), dtype=np.float32)
    w = np.repeat(draw.standard_normal((clients, D), dtype=np.float32), ROWS, 0)
    y = (draw.random(clients * ROWS) < 1 / (1 + np.exp(-(x * w).sum(1)))).astype(np.int64)
    split = Split(torch.from_numpy(x), torch.from_numpy(y), np.arange(clients + 1) * ROWS)
    names = tuple(str(i) for i in range(clients))
    federation = ft.Federation(split, split, names=names, labels=2, name="scale")
    player = Player(ft.FedCLUP(lam=0.5, lr=0.1, steps=20), federation, "linear", None, COHORT, VectorizedEngine)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        player()
        times.append(time.perf_counter() - began)
    return {"round_ms": 1e3 * statistics.median(times[2:]), "peak_gb": peak_kilobytes() / 2**20}


def run() -> list[dict[str, Any]]:
    found = {}
    for clients in (10_000, 100_000):
        out = subprocess.run([sys.executable, "-m", "benchmarks.scale", str(clients)], capture_output=True, text=True, check=True)
        found[clients] = json.loads(out.stdout)
    small, large = found[10_000], found[100_000]
    ratio = large["round_ms"] / small["round_ms"]
    return [
        {
            "case": "Scale: 100,000 clients, peak memory",
            "ours_ms": None,
            "bare_ms": None,
            "figure": f"{large['peak_gb']:.2f} GB",
            "wanted": "under 3 GB",
            "met": large["peak_gb"] < 3,
        },
        {
            "case": "Scale: a round among 100,000 clients against 10,000",
            "ours_ms": large["round_ms"],
            "bare_ms": small["round_ms"],
            "figure": f"{ratio:.2f}x the time",
            "wanted": "the same (at most 1.25x)",
            "met": ratio <= 1.25,
        },
    ]


if __name__ == "__main__":
    print(json.dumps(one_size(int(sys.argv[1])) if len(sys.argv) > 1 else run()))
