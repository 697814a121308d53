"""Reading a table as a federation, against pandas reading the same file: 1,000,000 rows of 1,000 clients.

``python -m benchmarks.tables`` prints time and peak memory of both (medians, a process per measurement), their ratios, and how
busy the machine was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd

from benchmarks.scale import peak_kilobytes

ROWS, CLIENTS, REPEATS = 1_000_000, 1_000, 3
CITIES = ("bern", "kyiv", "oslo", "paris", "prague", "riga", "rome", "vienna")


def write_table(path: Path, rows: int = ROWS, clients: int = CLIENTS) -> None:
    """Six measurements, one of them with gaps, an age, a category, a label of two classes."""
    draw = np.random.default_rng(0)
    columns = {f"v{j}": draw.normal(size=rows).round(4) for j in range(6)}
    columns["v5"][draw.random(rows) < 0.05] = np.nan
    pd.DataFrame(
        {
            "client": draw.integers(0, clients, rows),
            **columns,
            "age": draw.integers(18, 90, rows),
            "city": draw.choice(CITIES, rows),
            "label": draw.integers(0, 2, rows),
        }
    ).to_csv(path, index=False)


def measure(reader: str, path: str) -> tuple[float, float, float]:
    """Seconds, seconds of work on all cores, and peak megabytes of one reader in this process, whose imports are not timed."""
    if reader == "pandas":
        start, work = time.perf_counter(), time.process_time()
        pd.read_csv(path)
    else:
        from fedtailor.data import tables  # brings torch, whose memory counts as ours

        start, work = time.perf_counter(), time.process_time()
        tables.from_table(path, client="client", label="label")
    return time.perf_counter() - start, time.process_time() - work, peak_kilobytes() / 1024


def compare(path: Path, repeats: int = REPEATS) -> dict[str, tuple[float, ...]]:
    """Medians of both readers, measured in turns."""
    seen: dict[str, list[list[float]]] = {"pandas": [], "fedtailor": []}
    for _ in range(repeats):
        for reader, results in seen.items():
            command = [sys.executable, "-m", "benchmarks.tables", reader, str(path)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            results.append([float(number) for number in said])
    return {reader: tuple(median(column) for column in zip(*results, strict=True)) for reader, results in seen.items()}


def main() -> None:
    if len(sys.argv) == 3:
        print(*measure(sys.argv[1], sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.csv")
        write_table(path)
        found = compare(path)
    for reader, (seconds, work, megabytes) in found.items():
        print(f"{reader:10} {seconds:6.2f} s {work:6.2f} s of work {megabytes:7.0f} MB")
    ratios = [ours / theirs for ours, theirs in zip(found["fedtailor"], found["pandas"], strict=True)]
    print(f"{'ratio':10} {ratios[0]:6.2f}   {ratios[1]:6.2f}           {ratios[2]:7.2f}")
    print(f"load average of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
