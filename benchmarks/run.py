"""``make bench``: all workloads; prints a table and writes docs/results/speed.md.

``python -m benchmarks.run w1 start`` measures these parts only; the others' figures are kept.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import scale, w1, w2, whole
from benchmarks.kept import keep

PAGE = Path(__file__).parents[1] / "docs" / "results" / "speed.md"
HEAD = """# Speed and memory

Written by `make bench`. Every ratio is between two ways of doing the same steps, timed turn about in one run; times are medians
(W1: of nine goes, W2 and W3: two, the start: five) and depend on the machine, ratios much less. W1, W2 and W3 are described in
`benchmarks/`. Measuring is evaluation (about twenty times in a run; in W2 after every round) with the measures of the end; what
is timed there is a whole `ft.run`.

| workload | ours, ms | bare PyTorch, ms | measured | wanted | met |
|---|---|---|---|---|---|
"""


def line(row: dict[str, Any]) -> str:
    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

    met = "yes" if row["met"] else "**no**"
    return f"| {row['case']} | {ms(row['ours_ms'])} | {ms(row['bare_ms'])} | {row['figure']} | {row['wanted']} | {met} |"


PARTS: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
    "w1": w1.run,
    "w2": w2.small,
    "w3": w2.large,
    "scale": scale.run,
    "measuring": whole.measuring,
    "tuning": whole.tuning,
    "start": whole.start,
}


def page(parts: dict[str, Any]) -> str:
    lines = [line(row) for part in PARTS for row in parts.get(part, [])]
    missing = [part for part in PARTS if part not in parts]
    if missing:
        lines.append(f"\nNot measured yet: {', '.join(missing)}.")
    machine = f"\nMachine: {platform.machine()}, {os.cpu_count()} cores, one thread where not said, torch {torch.__version__}.\n"
    return HEAD + "\n".join(lines) + "\n" + machine


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("parts", nargs="*", choices=[*PARTS, []], help="parts to measure (default: all)")
    for part in flags.parse_args().parts or PARTS:
        rows = []
        for row in PARTS[part]():
            rows.append(row)
            print(line(row), flush=True)
        PAGE.write_text(page(keep("speed", part, rows)))


if __name__ == "__main__":
    main()
