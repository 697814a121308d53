"""The condition number: rounds and gradients that FedCLUP needs, against Corollary 2."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

import fedtailor as ft
from fedtailor.engine.setup import build_task
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column, one, slope
from fedtailor.theory.envelope import solve
from fedtailor.theory.rates import fedclup_rate, fedclup_steps

TARGET = 1e-6  # of the squared distance to g at the start
FIRST = 6  # round from which the rate is read; before, the clients' own errors settle


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return how fast g approaches the solution of Problem (2): the factor per round, and rounds and gradients to the target.

    The clients' Hessians share their directions, which is the worst case: their mean has the condition number too."""
    out = []
    for kappa in settings["kappas"]:
        design = {name: settings[name] for name in ("clients", "rows", "d", "R", "noise")}
        federation = ft.Federation.load("clup-regression", **design, kappa=kappa, aligned=True, seed=seed)
        double = federation.to(torch.float64)
        task = build_task("linear", double, 0, torch.float64, False)
        for lam in settings["lams"]:
            goal, distances = solve(task, double, lam).g["weight"], list[float]()

            def look(now: Any, goal: Any = goal, distances: list[float] = distances) -> None:
                distances.append(float(((now.shared["model"]["weight"] - goal) ** 2).sum()))

            options: dict[str, Any] = {
                "bias": False,
                "dtype": "float64",
                "evaluate_every": 0,
                "engine": "vectorized",
                "seed": seed,
            }
            ft.run(ft.FedCLUP(lam=lam, steps="theory"), federation, rounds=settings["rounds"], callbacks=[look], **options)
            rate = (distances[-1] / distances[FIRST - 1]) ** (1 / (settings["rounds"] - FIRST))
            rounds = math.log(TARGET) / math.log(rate)
            gradients = rounds * fedclup_steps(lam, 1.0, kappa).steps
            fit = {"rate": rate, "theory": fedclup_rate(lam, 1.0, kappa), "rounds": rounds, "gradients": gradients}
            out.append({"kappa": kappa, "lam": f"lam = {lam:g}", **fit})
    return out


def grid(rows: Rows, key: str) -> list[list[float]]:
    """Return a measure by lam (outer) and kappa (inner), both from the smallest on."""
    return [column(rows, key, lam=lam).tolist() for lam in dict.fromkeys(row["lam"] for row in rows)]


def least_growth(rows: Rows, key: str, smallest: int = 0) -> float:
    """Return the smallest factor by which a measure grows from one kappa to the next, over the lams from a place on."""
    return min(b / a for line in grid(rows, key)[smallest:] for a, b in pairwise(line))


def at_small_lam(rows: Rows) -> float:
    """Rounds at the largest kappa over those at the smallest, with the smallest lam."""
    line = grid(rows, "rounds")[0]
    return line[-1] / line[0]


def over_lam(rows: Rows) -> float:
    """Return the smallest factor by which rounds grow from one lam to the next."""
    lines = grid(rows, "rounds")
    return min(b / a for low, high in pairwise(lines) for a, b in zip(low, high, strict=True))


def more_at_large_lam(rows: Rows) -> float:
    """Return by how much more rounds grow with kappa at the largest lam than at the smallest, as a ratio."""
    small, *_, large = grid(rows, "rounds")
    return (large[-1] / large[0]) / (small[-1] / small[0])


def power(rows: Rows) -> float:
    """Return the power of kappa in the rounds at the largest lam."""
    largest = list(dict.fromkeys(row["lam"] for row in rows))[-1]
    kappas = list(dict.fromkeys(row["kappa"] for row in rows))
    return slope(kappas, [one(rows, "rounds", lam=largest, kappa=kappa) for kappa in kappas])


LAPTOP = {
    **{"clients": 8, "rows": 30, "d": 4, "R": 1.0, "noise": 0.3},
    **{"kappas": [2.0, 10.0, 50.0], "lams": [0.1, 1.0, 10.0], "rounds": 16},
}
EXPERIMENT = Experiment(
    "Rounds and gradients over the condition number",
    "Figures 7 and 8, Corollary 2",
    {
        "laptop": LAPTOP,
        "paper": {**LAPTOP, "clients": 20, "rows": 200, "d": 20, "kappas": [2.0, 10.0, 50.0, 200.0], "rounds": 40},
    },
    measure,
    Figure("kappa", "rounds", "lam", "condition number", "rounds to 1e-6", log_x=True, log_y=True),
    (
        Claim(
            "A round shrinks the error at least as Corollary 2 says (largest excess of the factor)",
            lambda rows: max(row["rate"] - row["theory"] for row in rows),
            below=0.0,
            theirs="1 - (λ+L)/(4κ(λ+μ))",
        ),
        Claim("Rounds grow with lam at every condition number (smallest factor)", over_lam, above=1.0),
        Claim(
            "Rounds grow with the condition number from lam = 1 on (smallest factor)",
            lambda rows: least_growth(rows, "rounds", 1),
            above=1.0,
        ),
        Claim(
            "With a small lam they hardly depend on it (largest over smallest condition number)",
            at_small_lam,
            above=0.8,
            below=1.25,
            theirs="1.05 by κ(λ+μ)/(λ+L)",
        ),
        Claim("They grow more at a larger lam (ratio of the two growths)", more_at_large_lam, above=1.0),
        Claim(
            "Gradients grow with the condition number at every lam (smallest factor)",
            lambda rows: least_growth(rows, "gradients"),
            above=1.0,
        ),
        Claim(
            "At a large lam rounds grow with the condition number, and not faster than it (power)",
            power,
            above=0.0,
            below=1.1,
            theirs="at most 1",
        ),
        Claim(
            "Rounds grow with the condition number at every lam, the smallest too (smallest factor)",
            lambda rows: least_growth(rows, "rounds"),
            above=1.0,
            must=False,
        ),
    ),
)
