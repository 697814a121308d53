"""Where one model stops paying: the R² at which FedAvg's excess risk equals local training's, over clients and rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.engine.setup import build_task
from fedtailor.metrics.truth import individual_excess_risk
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column, slope
from fedtailor.theory.envelope import solve

SHARES = (0.4, 1.0, 1.6)  # of a first guess of the crossing, 35/n


def excess(federation: ft.Federation, lam: float) -> float:
    """Return AER of the exact minimum at lam, on the test rows."""
    exact = federation.to(torch.float64)
    task = build_task("linear", exact, 0, torch.float64, False)
    pairs = zip(solve(task, exact, lam).models, map(exact.test.client, range(len(exact))), strict=True)
    losses = np.array([float(task.risk(dict(model), {"x": x, "y": y})) for model, (x, y) in pairs])
    return float(individual_excess_risk(task, exact, losses).mean())


def crossing(settings: Settings, seed: int, clients: int, rows: int) -> float:
    """Return the R² at which the difference of the two, nearly a line in R², is zero."""
    points, gaps = [], []
    for share in SHARES:
        for repetition in range(settings["repetitions"]):
            design = {"clients": clients, "rows": rows, "R": math.sqrt(share * 35 / rows), "d": settings["d"]}
            fed = ft.Federation.load("minimax-logistic", **design, test_rows=500, seed=1000 * seed + repetition)
            assert fed.truth is not None
            truth = torch.stack([model["weight"][-1] - model["weight"][0] for model in fed.truth]).double()
            points.append(float(((truth - truth.mean(0)) ** 2).sum(1).mean()))
            gaps.append(excess(fed, math.inf) - excess(fed, 0.0))
    rise, at_zero = np.polyfit(points, gaps, 1)
    return float(-at_zero / rise)


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    return [
        {"clients": m, "panel": f"{m} clients", "n": n, "edge": 1 / n, "R2": crossing(settings, seed, m, n)}
        for m in settings["clients"]
        for n in settings["rows"]
    ]


def spread(rows: Rows) -> float:
    """Return the largest factor by which a size is off c m/N, with one c for all."""
    over = np.log(column(rows, "R2") / column(rows, "edge"))
    return float(np.exp(np.abs(over - over.mean()).max()))


LAPTOP = {"d": 4, "clients": [5, 15], "rows": [100, 200, 400], "repetitions": 6}
EXPERIMENT = Experiment(
    "Where FedAvg and local training cross",
    "section 3.3, the dichotomy, on its logistic design",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "clients": [5, 15, 40], "repetitions": 100}},
    measure,
    Figure("n", "R2", "panel", "rows of a client", "R² at the crossing", log_x=True, log_y=True),
    (
        Claim("They cross at R² of the order of m/N (power of m/N)", lambda rows: slope(column(rows, "edge"), column(rows, "R2")),
              above=0.7, below=1.3, theirs="1", must=False),
        Claim("One constant does for all sizes (largest factor off)", spread, below=2.0, theirs="a constant", must=False),
    ),
)  # fmt: skip
