"""Federated stability: how far a client's loss moves when one of its own records is replaced, at the exact minima."""

from __future__ import annotations

import math
from typing import Any

import torch

import fedtailor as ft
from fedtailor.engine.setup import build_task
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column, one, slope
from fedtailor.papers.stability import envelope_solver, federated_stability

LOCAL, MIDDLE, SHARED = "local", "lam = 1", "FedAvg"


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the mean over clients of the largest change seen."""
    out = []
    for n in settings["rows"]:
        design = {name: settings[name] for name in ("clients", "d", "kappa", "noise", "R")}
        federation = ft.Federation.load("clup-regression", **design, rows=n, test_rows=50, seed=seed).to(torch.float64)
        task = build_task("linear", federation, 0, torch.float64, False)
        for label, lam in ((LOCAL, 0.0), (MIDDLE, 1.0), (SHARED, math.inf)):
            method = envelope_solver(task, lam)
            found = federated_stability(method, task, federation, records=settings["records"], seed=seed)
            out.append({"rows": n, "method": label, "gamma": float(found.gamma.mean())})
    return out


def gain(rows: Rows) -> float:
    """Return the smallest factor by which one model for all is more stable than local training."""
    return float((column(rows, "gamma", method=LOCAL) / column(rows, "gamma", method=SHARED)).min())


def between(rows: Rows) -> float:
    """At most rows, the smaller of the factors from local training to the middle lam and on to one model."""
    n = max(row["rows"] for row in rows)
    local, middle, shared = (one(rows, "gamma", rows=n, method=label) for label in (LOCAL, MIDDLE, SHARED))
    return min(local / middle, middle / shared)


def power(rows: Rows, label: str) -> float:
    return slope(column(rows, "rows", method=label), column(rows, "gamma", method=label))


LAPTOP = {"clients": 5, "d": 4, "kappa": 2.0, "noise": 0.5, "R": 0.1, "rows": [20, 80, 320], "records": 6}
EXPERIMENT = Experiment(
    "Federated stability",
    "Definition 5 and the proofs of Theorems 4 and 6",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "clients": 20, "d": 10, "rows": [20, 80, 320, 1280], "records": 20}},
    measure,
    Figure("rows", "gamma", "method", "rows of a client", "largest change of a loss", log_x=True, log_y=True),
    (
        Claim(
            "Local training's stability falls as 1/n (power of n)",
            lambda rows: power(rows, LOCAL),
            above=-1.5,
            below=-0.5,
            theirs="-1",
        ),
        Claim(
            "FedAvg's stability falls as 1/n too (power of n)",
            lambda rows: power(rows, SHARED),
            above=-1.5,
            below=-0.5,
            theirs="-1",
        ),
        Claim("One model for all is more stable than local models (smallest ratio)", gain, above=1.0, theirs="1/p_i = m = 5"),
        Claim("A middle lam lies between (smaller of the two ratios)", between, above=1.0),
    ),
)
