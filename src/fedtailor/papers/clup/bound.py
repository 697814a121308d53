"""Theorem 1 and Corollary 1: the bound over the measured error, by lam and R, and the lams that they choose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.engine.setup import build_task
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column
from fedtailor.theory.bounds import optimal_bound, optimal_lam, setting, statistical
from fedtailor.theory.envelope import solve_path

TINY, HUGE = 1e-4, 1e6  # local training and one model for all, on an axis of lam


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the squared error of Problem (2)'s exact solution, Theorem 1's bound, and the error at Corollary 1's lam."""
    out = []
    for R in settings["R"]:
        design = {name: settings[name] for name in ("clients", "rows", "d", "kappa", "noise")}
        federation = ft.Federation.load("clup-regression", **design, R=R, seed=seed).to(torch.float64)
        task = build_task("linear", federation, 0, torch.float64, False)
        assert federation.truth is not None
        truth = torch.stack([model["weight"] for model in federation.truth])
        apart = float(((truth - truth.mean(0)) ** 2).sum((1, 2)).max())
        # E |X'e/n|^2 = noise^2 trace(X'X/n)/n, and the spectrum of X'X/n is even in log from 1 to kappa
        rho2 = float(settings["noise"] ** 2 * np.logspace(0, math.log10(settings["kappa"]), settings["d"]).sum())
        known = setting(1.0, settings["kappa"], rho2, apart, settings["rows"], settings["clients"])
        advised = optimal_lam(known).lam
        lams = [TINY, *np.geomspace(1e-2, 1e4, settings["lams"]).tolist(), HUGE]
        for lam, solution in zip([*lams, advised], solve_path(task, federation, [*lams, advised]), strict=True):
            models = torch.stack([model["weight"] for model in solution.models])
            error = float(((models - truth) ** 2).sum((1, 2)).mean())
            row = {"R": f"R = {R:g}", "lam": lam, "error": error, "bound": statistical(lam, known).bound}
            out.append({**row, "advised": bool(lam == advised), "proved": optimal_bound(known)})
    return out


def by_R(rows: Rows) -> list[Rows]:  # noqa: N802
    return [[row for row in rows if row["R"] == R] for R in dict.fromkeys(row["R"] for row in rows)]


def best_lam(rows: Rows) -> float:
    return float(min(rows, key=lambda row: row["error"])["lam"])


def chosen_by_bound(rows: Rows) -> float:
    """Return the error at the lam with the least bound over the least error, at the worst R."""
    return max(min(part, key=lambda row: row["bound"])["error"] / column(part, "error").min() for part in by_R(rows))


def advised(rows: Rows) -> float:
    """Return the error at Corollary 1's lam over the least error, at the worst R."""
    return max(float(column(part, "error", advised=True)[0] / column(part, "error").min()) for part in by_R(rows))


def falls(rows: Rows) -> float:
    """Return by how many powers of ten the best lam falls from the least R to the largest."""
    parts = by_R(rows)
    return math.log10(best_lam(parts[0]) / best_lam(parts[-1]))


LAPTOP = {"clients": 10, "rows": 40, "d": 4, "kappa": 4.0, "noise": 0.5, "R": [0.0, 0.03, 0.1, 0.3, 1.0], "lams": 13}
EXPERIMENT = Experiment(
    "The bound over the measured error",
    "Theorem 1 and Corollary 1",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "clients": 50, "rows": 200, "d": 10, "lams": 37}},
    measure,
    Figure(
        "lam", "error", "R", "lam", "squared distance to the truth (dashed: the bound)", log_x=True, log_y=True, bound="bound"
    ),
    (
        Claim(
            "The error never exceeds Theorem 1's bound (largest error over bound)",
            lambda rows: max(row["error"] / row["bound"] for row in rows),
            below=1.0,
        ),
        Claim(
            "At Corollary 1's lam the error is below what it proves (largest ratio)",
            lambda rows: max(row["error"] / row["proved"] for row in rows if row["advised"]),
            below=1.0,
            theirs="C₃/N + C₄(R² ∧ 1/n)",
        ),
        Claim("The best lam falls as R grows (powers of ten, least R to largest)", falls, above=0.0),
        Claim(
            "Corollary 1's lam is near the best (its error over the least, worst R)", advised, below=4.0, theirs="up to constants"
        ),
        Claim(
            "The lam that minimises the bound is near the best (its error over the least, worst R)",
            chosen_by_bound,
            below=8.0,
            theirs="up to constants",
            must=False,
        ),
    ),
)
