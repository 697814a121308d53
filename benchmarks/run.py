"""``make bench``: all workloads; prints a table and writes docs/results/speed.md."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from benchmarks import scale, w1, w2

HEAD = """# Speed and memory

Written by `make bench`. Every ratio is between two ways of doing the same steps, timed turn about in one run; times are medians
of five goes and depend on the machine, ratios much less. W1 and W2 are described in `benchmarks/`.

| workload | ours, ms | bare PyTorch, ms | measured | wanted | met |
|---|---|---|---|---|---|
"""


def line(row: dict[str, Any]) -> str:
    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"

    met = "yes" if row["met"] else "**no**"
    return f"| {row['case']} | {ms(row['ours_ms'])} | {ms(row['bare_ms'])} | {row['figure']} | {row['wanted']} | {met} |"


def main() -> None:
    lines = []
    for part in (w1.run, w2.run, scale.run):
        for row in part():
            lines.append(line(row))
            print(lines[-1], flush=True)
    machine = f"\nMachine: {platform.machine()}, {torch.get_num_threads()} thread(s) where not said, torch {torch.__version__}.\n"
    target = Path(__file__).parents[1] / "docs" / "results" / "speed.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(HEAD + "\n".join(lines) + "\n" + machine)


if __name__ == "__main__":
    main()
