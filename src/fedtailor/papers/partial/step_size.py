"""The step size: a smaller one is slower and ends lower."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column
from fedtailor.papers.split_problem import LAPTOP, METHODS, PAPER, floor, path


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the squared gradient over rounds, for both methods and every step size."""
    runs = [path(name, settings, seed, lr=lr) for name in METHODS for lr in settings["lrs"]]
    return [{**row, "step": f"step {row['lr']:g}"} for rows in runs for row in rows]


def by_step(rows: Rows, method: str) -> list[Any]:
    """Return the curves of a method, from the largest step on."""
    return [column(rows, "norm", method=method, lr=lr) for lr in sorted({row["lr"] for row in rows}, reverse=True)]


def lower(rows: Rows) -> float:
    """FedAvg-P's floor at the largest step over that at the smallest."""
    large, *_, small = by_step(rows, "FedAvg-P")
    return floor(large) / floor(small)


def slower(rows: Rows) -> float:
    """Rounds until FedAvg-P is within twice its floor, with the smallest step over with the largest."""
    large, *_, small = ((np.flatnonzero(curve <= 2 * floor(curve))[0] + 1) for curve in by_step(rows, "FedAvg-P"))
    return float(small / large)


def early(rows: Rows, method: str) -> float:
    """Return the gradient at the first look, with the smallest step over with the largest."""
    large, *_, small = by_step(rows, method)
    return float(small[0] / large[0])


def ahead(rows: Rows) -> float:
    """Return the smallest ratio of FedAvg-P's floor to Scaffold-P's, over the step sizes."""
    pairs = zip(by_step(rows, "FedAvg-P"), by_step(rows, "Scaffold-P"), strict=True)
    return min(floor(ours) / floor(theirs) for ours, theirs in pairs)


EXPERIMENT = Experiment(
    "Gradient over rounds by step size",
    "section 5, step sizes",
    {"laptop": {**LAPTOP, "lrs": [1.0, 0.3, 0.1]}, "paper": {**PAPER, "lrs": [0.01, 0.003, 0.001]}},
    measure,
    Figure("round", "norm", "step", "rounds", "squared gradient", log_y=True, panel="method"),
    (
        Claim("A smaller step lowers FedAvg-P's floor (floor of the largest over that of the smallest)", lower, above=1.0),
        Claim("A smaller step makes FedAvg-P slower (rounds to twice its floor, smallest over largest)", slower, above=1.0),
        Claim(
            "A smaller step makes Scaffold-P slower (first look, smallest over largest)",
            lambda rows: early(rows, "Scaffold-P"),
            above=1.0,
        ),
        Claim("Scaffold-P's floor is below FedAvg-P's at every step size (smallest ratio)", ahead, above=1.0),
        Claim(
            "FedAvg-P is behind at the first look already (smallest step over largest)",
            lambda rows: early(rows, "FedAvg-P"),
            above=1.0,
            must=False,
        ),
    ),
)
