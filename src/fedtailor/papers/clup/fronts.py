"""Error over rounds for several lams: small ones are quick, large ones end lower, and their curves cross."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column

DYNAMIC = "growing lam"


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the mean squared distance of the clients' models to their true parameters after every round."""
    design = {name: settings[name] for name in ("clients", "rows", "d", "kappa", "R", "noise")}
    federation = ft.Federation.load("clup-regression", **design, seed=seed)
    watched = replace(
        federation, val=federation.test
    )  # the truth judges, so that test rows are free for the growing lam to watch
    assert federation.truth is not None
    truth = torch.stack([model["weight"].double() for model in federation.truth])
    methods: dict[str, Any] = {f"lam = {lam:g}": ft.FedCLUP(lam=lam, steps="theory") for lam in settings["lams"]}
    grown = {"lam": settings["lams"][0], "ceiling": settings["lams"][-1], "patience": 1, "factor": 3.0, "tolerance": 0.01}
    methods[DYNAMIC] = ft.FedCLUPDynamic(**grown, lr=1 / (settings["kappa"] + settings["lams"][-1]), steps=settings["steps"])
    out: list[dict[str, Any]] = []
    for label, method in methods.items():

        def look(now: Any, label: str = label) -> None:
            models = torch.stack([now.personal(i)["model"]["weight"] for i in range(len(truth))])
            error = float(((models - truth) ** 2).sum((1, 2)).mean())
            out.append({"round": now.record["round"] + 1, "method": label, "error": error})

        options: dict[str, Any] = {"bias": False, "dtype": "float64", "evaluate_every": 0, "engine": "vectorized", "seed": seed}
        ft.run(method, watched, rounds=settings["rounds"], callbacks=[look], **options)
    return out


def curves(rows: Rows) -> dict[str, np.ndarray]:
    """Return the error over rounds of every fixed lam, from the smallest lam on."""
    return {label: column(rows, "error", method=label) for label in dict.fromkeys(r["method"] for r in rows) if label != DYNAMIC}


def rounds_to(errors: np.ndarray, target: float) -> float:
    """Rounds until the error is below a target; inf where it never is."""
    reached = np.flatnonzero(errors <= target)
    return float(reached[0] + 1) if len(reached) else float("inf")


def settling(rows: Rows) -> list[float]:
    """Rounds until each lam is within a tenth of its own last error."""
    return [rounds_to(errors, 1.1 * errors[-1]) for errors in curves(rows).values()]


def quickest(rows: Rows, target: float) -> int:
    return int(np.argmin([rounds_to(errors, target) for errors in curves(rows).values()]))


def hard_and_easy(rows: Rows) -> float:
    """Return by how many places the lam with the fewest rounds grows from an easy target to the hardest that is reached."""
    errors = list(curves(rows).values())
    easy, hard = 1.05 * max(e[-1] for e in errors), 1.05 * min(e[-1] for e in errors)
    return float(quickest(rows, hard) - quickest(rows, easy))


def winners(rows: Rows) -> float:
    """Return how many lams are the best at some round."""
    return float(len(set(np.argmin(np.stack(list(curves(rows).values())), 0).tolist())))


def end(rows: Rows) -> float:
    last = [errors[-1] for errors in curves(rows).values()]
    return last[0] / last[-1]


def beginning(rows: Rows) -> float:
    first = [errors[0] for errors in curves(rows).values()]
    return first[-1] / first[0]


def envelope(rows: Rows) -> float:
    """Return the median over rounds of the growing lam's error over that of the best fixed lam at that round."""
    best = np.stack(list(curves(rows).values())).min(0)
    return float(np.median(column(rows, "error", method=DYNAMIC) / best))


LAPTOP = {
    **{"clients": 10, "rows": 20, "d": 5, "kappa": 10.0, "R": 0.1, "noise": 1.0},
    **{"lams": [0.1, 0.5, 2.0, 10.0], "rounds": 60, "steps": 60},
}
EXPERIMENT = Experiment(
    "Error over rounds of communication",
    "Figure 3, on least squares with known constants",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "clients": 100, "rows": 200, "d": 10, "rounds": 300}},
    measure,
    Figure("round", "error", "method", "rounds", "squared distance to the truth", log_y=True),
    (
        Claim(
            "Small lam settles in fewer rounds (rounds of the largest over those of the smallest)",
            lambda rows: settling(rows)[-1] / settling(rows)[0],
            above=1.0,
            theirs="κ(λ+μ)/(λ+L)",
        ),
        Claim(
            "Rounds to settle never fall as lam grows (largest fall)",
            lambda rows: float(-np.diff(settling(rows)).min()),
            below=0.5,
        ),
        Claim("In the first round the smallest lam is ahead (error of the largest over its own)", beginning, above=1.0),
        Claim("In the end the largest lam is ahead where clients are alike (error of the smallest over its own)", end, above=1.0),
        Claim("The curves cross: how many lams are best at some round", winners, above=1.5),
        Claim("A harder target wants a larger lam (places)", hard_and_easy, above=0.0),
        Claim(
            "A growing lam follows the envelope of the fixed ones (its error over the best, median over rounds)",
            envelope,
            below=1.5,
        ),
    ),
)
