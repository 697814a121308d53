"""How many clients take part: more of them lower FedAvg-P's floor, and Scaffold-P has none."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column
from fedtailor.papers.split_problem import LAPTOP, METHODS, PAPER, floor, path


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the squared gradient over rounds, for both methods and every number of clients per round."""
    runs = [path(name, settings, seed, cohort=m) for name in METHODS for m in settings["cohorts"]]
    return [{**row, "clients": f"{row['cohort']} clients"} for rows in runs for row in rows]


def floors(rows: Rows, method: str) -> list[float]:
    """Return the floors of a method, from the fewest clients on."""
    return [floor(column(rows, "norm", method=method, cohort=m)) for m in sorted({row["cohort"] for row in rows})]


def falls(rows: Rows) -> float:
    """Return the smallest factor by which FedAvg-P's floor falls from one turnout to the next."""
    levels = np.array(floors(rows, "FedAvg-P"))
    return float((levels[:-1] / levels[1:]).min())


def ahead(rows: Rows) -> float:
    """Return the smallest ratio of FedAvg-P's floor to Scaffold-P's where not all take part."""
    return min(a / b for a, b in list(zip(floors(rows, "FedAvg-P"), floors(rows, "Scaffold-P"), strict=True))[:-1])


def still_falling(rows: Rows) -> float:
    """Return the smallest factor by which Scaffold-P's gradient falls in the second half of the run."""
    curves = [column(rows, "norm", method="Scaffold-P", cohort=m) for m in sorted({row["cohort"] for row in rows})]
    return min(float(curve[len(curve) // 2] / curve[-1]) for curve in curves)


def stuck(rows: Rows) -> float:
    """With the fewest clients, how much more Scaffold-P's gradient falls from the second third to the last than FedAvg-P's."""
    ratios = []
    for method in METHODS:
        curve = column(rows, "norm", method=method, cohort=min(row["cohort"] for row in rows))
        third = len(curve) // 3
        ratios.append(curve[third : 2 * third].mean() / curve[-third:].mean())
    return float(ratios[1] / ratios[0])


EXPERIMENT = Experiment(
    "Gradient over rounds by turnout",
    "section 5, clients per round",
    {"laptop": {**LAPTOP, "cohorts": [2, 5, 10]}, "paper": {**PAPER, "cohorts": [3, 5, 7, 9, 10]}},
    measure,
    Figure("round", "norm", "clients", "rounds", "squared gradient", log_y=True, panel="method"),
    (
        Claim("More clients per round lower FedAvg-P's floor (smallest factor)", falls, above=1.0),
        Claim(
            "Scaffold-P's floor is well below FedAvg-P's where not all take part (smallest ratio)", ahead, above=3.0, theirs="≪"
        ),
        Claim("Scaffold-P has no floor: its gradient goes on falling (second half, smallest factor)", still_falling, above=1.5),
        Claim("FedAvg-P with few clients has one (fall over the last thirds, Scaffold-P's over its own)", stuck, above=1.5),
    ),
)
