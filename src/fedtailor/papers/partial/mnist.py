"""Both methods on the digits, with the regulariser that is not convex: step size, turnout and local steps, one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column
from fedtailor.papers.split_problem import LAPTOP, METHODS, PAPER, floor, path

FEDAVG, SCAFFOLD = METHODS
BASE, SHORT, FEW, ALL, LONG = "as set", "smaller step", "few clients", "all clients", "more local steps"


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the squared gradient over rounds, for both methods and every change."""
    changes: dict[str, dict[str, Any]] = {
        BASE: {},
        SHORT: {"lr": settings["lr"] / 3},
        FEW: {"cohort": settings["few"]},
        ALL: {"cohort": settings["clients"]},
        LONG: {"steps": settings["more"]},
    }
    return [
        {**row, "case": case} for name in METHODS for case, new in changes.items() for row in path(name, settings, seed, **new)
    ]


def curve(rows: Rows, method: str, case: str) -> np.ndarray:
    return column(rows, "norm", method=method, case=case)


def floors(rows: Rows, method: str, a: str, b: str) -> float:
    """Return the floor in one case over that in another."""
    return floor(curve(rows, method, a)) / floor(curve(rows, method, b))


def early(rows: Rows, method: str, a: str, b: str) -> float:
    """Return the gradient at the first look in one case over that in another."""
    return float(curve(rows, method, a)[0] / curve(rows, method, b)[0])


def speed_up(rows: Rows) -> float:
    """Rounds until FedAvg-P is at twice its floor with few clients: with few over with all."""
    target = 2 * floor(curve(rows, FEDAVG, FEW))
    few, every = (np.flatnonzero(curve(rows, FEDAVG, case) <= target) for case in (FEW, ALL))
    return float((few[0] + 1) / (every[0] + 1)) if len(few) and len(every) else float("nan")


def ahead(rows: Rows) -> float:
    """FedAvg-P's floor over Scaffold-P's, least over the cases where not all take part."""
    return min(floor(curve(rows, FEDAVG, case)) / floor(curve(rows, SCAFFOLD, case)) for case in (BASE, SHORT, FEW, LONG))


SMALL = {**LAPTOP, "data": "mnist", "rows": 100, "side": 7, "partition": "classes:4", "few": 2, "more": 25}
EXPERIMENT = Experiment(
    "Gradient over rounds on MNIST",
    "Figures 1 and 2",
    {"laptop": SMALL, "paper": {**PAPER, "few": 3, "more": 50}},
    measure,
    Figure("round", "norm", "case", "rounds", "squared gradient", log_y=True, panel="method"),
    (
        Claim("A smaller step lowers FedAvg-P's floor (as set over smaller)", lambda rows: floors(rows, FEDAVG, BASE, SHORT),
              above=1.0, must=False),
        Claim("More clients lower FedAvg-P's floor (few over as set)", lambda rows: floors(rows, FEDAVG, FEW, BASE), above=1.0,
              must=False),
        Claim("And all of them further (as set over all)", lambda rows: floors(rows, FEDAVG, BASE, ALL), above=1.0, must=False),
        Claim("More clients are faster (rounds to twice the floor of few, few over all)", speed_up, above=1.0, must=False),
        Claim("More local steps make FedAvg-P faster (first look, as set over more)",
              lambda rows: early(rows, FEDAVG, BASE, LONG), above=1.0, must=False),
        Claim("More local steps make Scaffold-P faster (first look, as set over more)",
              lambda rows: early(rows, SCAFFOLD, BASE, LONG), above=1.0, must=False),
        Claim("They raise FedAvg-P's floor where some take part (more over as set)",
              lambda rows: floors(rows, FEDAVG, LONG, BASE), above=1.0, must=False),
        Claim("They do not raise Scaffold-P's (more over as set)", lambda rows: floors(rows, SCAFFOLD, LONG, BASE), below=1.0,
              must=False),
        Claim("Scaffold-P's floor is well below FedAvg-P's where not all take part (least ratio)", ahead, above=3.0, theirs="≪",
              must=False),
    ),
    convex=False,
)  # fmt: skip
