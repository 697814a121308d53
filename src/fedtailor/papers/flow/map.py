"""Where routing pays: generated rows of two kinds, over the share of common rows, rows of a client, how far a row shows its kind.

Every method is tuned alike on validation rows.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

import fedtailor as ft
from fedtailor.papers.base import Claim, Experiment, Figure, Pieces, Rows, Settings, one

PAPER, EASED = "Flow, paper", "Flow, eased"
GRID: dict[str, list[float]] = {
    "lr": [0.1, 0.3],
    "finetune_epochs": [5, 20],
    "local_epochs": [5, 20],
    "lam": [0.03, 0.3],
    "alpha": [0.25, 0.5, 0.75],
}
METHODS: dict[str, ft.Algorithm] = {
    "FedAvg": ft.FedAvg(lr=0.3),
    "FedAvgFT": ft.FedAvgFT(lr=0.3, finetune_epochs=5),
    "Ditto": ft.Ditto(lr=0.3, lam=0.3, personal_epochs=5),
    "APFL": ft.APFL(lr=0.3, alpha=0.5),
    PAPER: ft.Flow(lr=0.3, local_epochs=5, router_lr=1.0),
    EASED: ft.Flow(lr=0.3, local_epochs=5, router_lr=1.0, variant="eased", inference="soft", redraw=True),
}
RIVALS = ("FedAvg", "FedAvgFT", "Ditto", "APFL")


def cells(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the map's federations by name."""
    keys = ("share", "rows", "visible")
    found = [dict(zip(keys, values, strict=True)) for values in product(*(settings[key] for key in keys))]
    return {", ".join(f"{key} {value:g}" for key, value in cell.items()): cell for cell in found}


def measure(settings: Settings, seed: int, name: str) -> list[dict[str, Any]]:
    """Return a row per method on one federation of the map, with how well the router's first layer tells the kinds apart."""
    cell = cells(settings)[name]
    federation = ft.Federation.load("instances", clients=settings["clients"], seed=seed, test_rows=300, **cell)
    how: dict[str, Any] = {"batch_size": 20, "engine": "vectorized", "evaluate_every": 0, "seed": seed}
    found = ft.compare(METHODS, federation, settings["model"], rounds=settings["rounds"], tune=GRID, yardsticks=(), **how)
    out = []
    for label in METHODS:
        summary = found.all[label][0].summary
        areas = (summary.get("routing") or {}).get("kind_auc") or [None]
        where = {"cell": name, **cell, "panel": f"{cell['rows']} rows, visible {cell['visible']:g}"}
        out.append({**where, "method": label, "accuracy": summary["acc_personal"], "auc": areas[0]})
    return out


def gains(rows: Rows, label: str, visible: float | None = None) -> np.ndarray:
    """Return how far a method is above its best rival in each cell, or in those where the kinds are so visible."""
    names = dict.fromkeys(row["cell"] for row in rows if visible is None or row["visible"] == visible)
    best = [max(one(rows, "accuracy", cell=name, method=rival) for rival in RIVALS) for name in names]
    return np.array([one(rows, "accuracy", cell=name, method=label) for name in names]) - np.array(best)


def most(rows: Rows) -> float:
    return max(row["visible"] for row in rows)


def area(rows: Rows) -> float:
    """Return the least area under the curve of the eased router's first layer, where the kinds are most visible."""
    found = [row["auc"] for row in rows if row["method"] == EASED and row["visible"] == most(rows)]
    return min(float("nan") if value is None else float(value) for value in found)


LAPTOP = {"clients": 20, "model": "mlp:32", "rounds": 60, "share": [0.25, 0.5, 0.75], "rows": [60], "visible": [0.0, 4.0]}
EXPERIMENT = Experiment(
    "Where routing pays",
    "what was added here",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "rows": [30, 60, 120], "visible": [0.0, 2.0, 4.0], "rounds": 300}},
    Pieces(lambda settings: list(cells(settings)), measure),
    Figure("share", "accuracy", "method", "share of common rows", "accuracy of the personal models", panel="panel"),
    (
        Claim("Flow as printed is above its best rival somewhere (largest gain)", lambda rows: float(gains(rows, PAPER).max()),
              above=0.0, must=False),
        Claim("Where rows show their kind the eased Flow is above its best rival (least gain)",
              lambda rows: float(gains(rows, EASED, most(rows)).min()), above=0.0, must=False),
        Claim("Where they do not it gains nothing (largest gain)", lambda rows: float(gains(rows, EASED, 0.0).max()),
              below=0.005, must=False),
        Claim("And loses no more than two points (least gain)", lambda rows: float(gains(rows, EASED, 0.0).min()), above=-0.02,
              must=False),
        Claim("Its router tells the kinds apart where rows show them (least area under the curve)", area, above=0.6, must=False),
    ),
    convex=False,
)  # fmt: skip
