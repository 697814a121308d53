"""How the errors of local training and of one model scale with rows, clients and R, at the exact minima."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.engine.setup import build_task
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column, one, slope
from fedtailor.papers.minimax_theory import lower_average
from fedtailor.theory.envelope import solve

LOCAL, SHARED = "local", "FedAvg"


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the mean squared error of the minima of both problems, averaged over repetitions, for every m, n and R."""
    out = []
    for m in settings["clients"]:
        for n in settings["rows"]:
            for R in settings["R"]:
                errors: dict[str, list[np.ndarray]] = {LOCAL: [], SHARED: []}
                for repetition in range(settings["repetitions"]):
                    design = {"clients": m, "rows": n, "d": settings["d"], "kappa": 1.0, "noise": 1.0, "R": R}
                    federation = ft.Federation.load("clup-regression", **design, test_rows=1, seed=1000 * seed + repetition)
                    for label, lam in ((LOCAL, 0.0), (SHARED, math.inf)):
                        errors[label].append(clients_errors(federation.to(torch.float64), lam))
                for label, values in errors.items():
                    lower = lower_average(settings["d"], m, m * n, R**2)
                    point = {"m": m, "n": n, "N": m * n, "R": R, "method": label, "error": float(np.mean(values))}
                    point["individual"] = float(np.mean([each[0] for each in values]))
                    out.append({**point, "lower": lower, "design": f"{label}, R = {R:g}, {m} clients"})
    return out


def clients_errors(federation: ft.Federation, lam: float) -> np.ndarray:
    """Return the squared distance of every client's model, at the minimum, to its truth: their mean is AER, that of one client
    IER."""
    assert federation.truth is not None
    task = build_task("linear", federation, 0, torch.float64, False)
    models = solve(task, federation, lam).models
    pairs = zip(models, federation.truth, strict=True)
    return np.array([float(((m["weight"] - t["weight"]) ** 2).sum()) for m, t in pairs])


def power_of_rows(rows: Rows, risk: str = "error") -> float:
    """Return the power of n in local training's error, over all its points."""
    return slope(column(rows, "n", method=LOCAL), column(rows, risk, method=LOCAL))


def power_of_all_rows(rows: Rows, risk: str = "error") -> float:
    """Return the power of N in FedAvg's error where clients are alike."""
    return slope(column(rows, "N", method=SHARED, R=0.0), column(rows, risk, method=SHARED, R=0.0))


def power_of_R(rows: Rows) -> float:  # noqa: N802
    """Return the power of R in FedAvg's error, where it dominates: most rows, the two largest R."""
    largest = {"n": max(r["n"] for r in rows), "m": max(r["m"] for r in rows), "method": SHARED}
    return slope(column(rows, "R", **largest)[-2:], column(rows, "error", **largest)[-2:])


def over_lower(rows: Rows) -> float:
    """Return the better of the two over the lower bound with constant one, at its largest."""
    points = {(r["m"], r["n"], r["R"]): r["lower"] for r in rows}
    return max(min(column(rows, "error", m=m, n=n, R=R)) / low for (m, n, R), low in points.items())


def switch(rows: Rows) -> float:
    """Return how many of the points with R^2 a tenth of m/N or less have FedAvg ahead, and with ten times or more local
    training."""
    right = []
    for m, n, R in {(r["m"], r["n"], r["R"]) for r in rows}:
        ahead = one(rows, "error", m=m, n=n, R=R, method=SHARED) < one(rows, "error", m=m, n=n, R=R, method=LOCAL)
        edge = 4 / n  # d m/N, with d = 4 parameters
        if edge / 10 < R**2 < 10 * edge:
            continue
        right.append(ahead == (edge > R**2))
    return float(np.mean(right))


LAPTOP = {"d": 4, "clients": [4, 16], "rows": [20, 80, 320], "R": [0.0, 0.5, 2.0], "repetitions": 4}
EXPERIMENT = Experiment(
    "Rates of FedAvg and local training",
    "Theorems 4, 6 and 8, on least squares",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "clients": [4, 16, 64], "repetitions": 100}},
    measure,
    Figure("n", "error", "design", "rows of a client", "squared distance to the truth", log_x=True, log_y=True),
    (
        Claim("Local training's error falls as 1/n (power of n)", power_of_rows, above=-1.2, below=-0.8, theirs="-1"),
        Claim(
            "FedAvg's error falls as 1/N where clients are alike (power of N)",
            power_of_all_rows,
            above=-1.3,
            below=-0.7,
            theirs="-1",
        ),
        Claim(
            "One client's error, IER: local training's falls as 1/n (power of n)",
            lambda rows: power_of_rows(rows, "individual"),
            above=-1.3,
            below=-0.7,
            theirs="-1",
            must=False,
        ),
        Claim(
            "One client's error, IER: FedAvg's falls as 1/N where clients are alike (power of N)",
            lambda rows: power_of_all_rows(rows, "individual"),
            above=-1.3,
            below=-0.7,
            theirs="-1",
            must=False,
        ),
        Claim("FedAvg's error grows as R² (power of R)", power_of_R, above=1.8, below=2.2, theirs="2"),
        Claim("Far from R² = d m/N the right one of the two is ahead (share of the designs)", switch, above=0.999),
        Claim(
            "The better of the two is within a constant of the lower bound (largest ratio)",
            over_lower,
            below=6.0,
            theirs="a constant",
        ),
    ),
)
