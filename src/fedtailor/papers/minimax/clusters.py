"""The counter-example of section 3.3: groups far apart defeat FedAvg and local training, and FedAvg inside each group wins."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtailor as ft
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column

FEDAVG, LOCAL, INSIDE = "FedAvg", "local", "FedAvg inside each group"


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the mean squared distance to the truth of the three, over the rows of a client."""
    options: dict[str, Any] = {
        "bias": False,
        "evaluate_every": 0,
        "engine": "vectorized",
        "rounds": settings["rounds"],
        "seed": seed,
    }
    groups, out = settings["groups"], []
    for rows in settings["rows"]:
        design = {name: settings[name] for name in ("clients", "groups", "d", "R", "distance", "noise")}
        federation = ft.Federation.load("clusters", **design, rows=rows, test_rows=10, seed=seed)
        shared, alone = ft.FedAvg(lr=0.1, steps=5), ft.Local(lr=0.1, steps=5)
        parts = [federation.take(range(group, len(federation), groups)) for group in range(groups)]
        errors = {
            FEDAVG: [ft.run(shared, federation, **options)],
            LOCAL: [ft.run(alone, federation, **options)],
            INSIDE: [ft.run(shared, part, **options) for part in parts],
        }
        for label, runs in errors.items():
            out.append({"rows": rows, "method": label, "error": float(np.mean([r.summary["distance_personal"] for r in runs]))})
    return out


def worst_ratio(rows: Rows, rival: str) -> float:
    """Return the smallest factor by which FedAvg inside the groups has less error than a rival."""
    return float((column(rows, "error", method=rival) / column(rows, "error", method=INSIDE)).min())


def stuck(rows: Rows) -> float:
    errors = column(rows, "error", method=FEDAVG)
    return float(errors[-1] / errors[0])


LAPTOP = {
    **{"clients": 16, "groups": 4, "d": 8, "R": 0.05, "distance": 5.0, "noise": 1.0},
    **{"rows": [20, 60], "rounds": 40},
}
EXPERIMENT = Experiment(
    "Groups of clients",
    "section 3.3, the counter-example",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "clients": 100, "groups": 10, "d": 20, "rows": [20, 60, 200], "rounds": 200}},
    measure,
    Figure("rows", "error", "method", "rows of a client", "squared distance to the truth", log_x=True, log_y=True),
    (
        Claim(
            "Inside the groups FedAvg has less error than local training (smallest ratio)",
            lambda rows: worst_ratio(rows, LOCAL),
            above=1.0,
            theirs="√m",
        ),
        Claim("And less than FedAvg over all (smallest ratio)", lambda rows: worst_ratio(rows, FEDAVG), above=10.0),
        Claim("More rows do not help FedAvg over all (error with most rows over that with least)", stuck, above=0.8),
    ),
)
