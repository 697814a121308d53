"""``make bench-tables``: a million rows read, beside pandas reading the same file, and a comparison on a wide table, from the
command to the report; writes docs/results/tables.md.

Every measurement is a process of its own; ``python -m benchmarks.tables read`` (or ``compare``) measures one of the two alone
and writes nothing.
"""

from __future__ import annotations

import os
import resource
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
LIMIT = 2.0  # times pandas
COLUMNS, MOST = 40, 90  # of the wide table; seconds
EVEN = (25_000,) * 8
UNEVEN = (1_000, 2_000, 5_000, 10_000, 15_000, 27_000, 40_000, 100_000)
FLAGS = ["--client", "client", "--label", "label", "--methods", "local,fedavg,fedclup,ditto", "--rounds", "30"]
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


def read_both(path: Path, repeats: int = REPEATS) -> dict[str, tuple[float, ...]]:
    """Medians of both readers, measured in turns."""
    seen: dict[str, list[list[float]]] = {"pandas": [], "fedtailor": []}
    for _ in range(repeats):
        for reader, results in seen.items():
            command = [sys.executable, "-m", "benchmarks.tables", reader, str(path)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            results.append([float(number) for number in said])
    return {reader: tuple(median(column) for column in zip(*results, strict=True)) for reader, results in seen.items()}


def reading(folder: Path) -> list[str]:
    path = folder / "million.csv"
    write_table(path)
    found = read_both(path)
    lines = [
        f"Reading {ROWS:,} rows of {CLIENTS:,} clients, 10 columns, as a federation (checked, split, encoded), beside pandas "
        f"reading the same file: medians of {REPEATS}, each in a process of its own. Wanted: below {LIMIT:g} times pandas.",
        "",
        "| | seconds | seconds of work on all cores | peak MB |",
        "|---|---|---|---|",
    ]
    lines += [f"| {reader} | {s:.2f} | {work:.2f} | {mb:,.0f} |" for reader, (s, work, mb) in found.items()]
    ratios = [ours / theirs for ours, theirs in zip(found["fedtailor"], found["pandas"], strict=True)]
    met = ["yes" if ratio < LIMIT else "**no**" for ratio in ratios[:2]]
    return [*lines, f"| ratio | {ratios[0]:.2f} (met: {met[0]}) | {ratios[1]:.2f} (met: {met[1]}) | {ratios[2]:.2f} |"]


def write_wide(path: Path, sizes: tuple[int, ...]) -> None:
    """Forty measurements, a label of two classes whose dependence on them differs a little from client to client."""
    draw, rows = np.random.default_rng(0), sum(sizes)
    x = draw.normal(size=(rows, COLUMNS)).round(4)
    client = np.repeat(np.arange(len(sizes)), sizes)
    truth = draw.normal(size=COLUMNS) / 4 + draw.normal(size=(len(sizes), COLUMNS)) / 8
    chance = 1 / (1 + np.exp(-(x * truth[client]).sum(1)))
    columns = {"client": client, **{f"v{j}": x[:, j] for j in range(COLUMNS)}, "label": (draw.random(rows) < chance).astype(int)}
    pd.DataFrame(columns).iloc[draw.permutation(rows)].to_csv(path, index=False)


def comparing(folder: Path) -> list[str]:
    lines = [
        f"`fedtailor compare` on a table of {sum(EVEN):,} rows, {COLUMNS} columns and {len(EVEN)} clients: Local, FedAvg, "
        "FedCLUP and Ditto, 30 rounds of an epoch in batches of 32, from the command to the report. Wanted: under "
        f"{MOST} s on two quiet cores.",
        "",
        "| clients | seconds | seconds of work on all cores | met |",
        "|---|---|---|---|",
    ]
    for name, sizes in (("all alike", EVEN), ("from 1,000 to 100,000 rows", UNEVEN)):
        path = folder / "wide.csv"
        write_wide(path, sizes)
        seconds, work = _timed(["compare", str(path), *FLAGS, "--out", str(folder / name)])
        lines.append(f"| {name} | {seconds:.1f} | {work:.1f} | {'yes' if seconds < MOST else '**no**'} |")
    return lines


def _timed(command: list[str]) -> tuple[float, float]:
    """Seconds of one command of ours in a process, and its seconds of work."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "fedtailor", *command], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    work = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, work


def main() -> None:
    if len(sys.argv) == 3:
        print(*measure(sys.argv[1], sys.argv[2]))
        return
    parts = {"read": reading, "compare": comparing}
    chosen = sys.argv[1:] or list(parts)
    with tempfile.TemporaryDirectory() as folder:
        found = [line for name in chosen for line in [*parts[name](Path(folder)), ""]]
    busy = f"Load average of the last minute at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    text = "\n".join(["# Tables", "", "Written by `make bench-tables`.", "", *found, busy, ""])
    print(text)
    if len(chosen) == len(parts):
        (Path(__file__).parents[1] / "docs" / "results" / "tables.md").write_text(text)


if __name__ == "__main__":
    main()
