"""The theorems' own steps: the mean squared gradient over T rounds, and the bounds on it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column, slope
from fedtailor.papers.split_problem import LAPTOP, PAPER, load, looks
from fedtailor.theory import partial

SOME, ALL, SCAFFOLD = "FedAvg-P, some clients", "FedAvg-P, all clients", "Scaffold-P, some clients"
DECLARED = -1.0  # the power of T in the theorems with full batches
QUIET: dict[str, Any] = {"sigma_u2": 0.0, "sigma_v2": 0.0}  # full batches


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """For every T, the mean over the rounds t < T of G_u + (m/n) G_v at their start, and what the theorem allows."""
    _, federation = load(settings, seed)
    rows = [federation.train.client(i)[0] for i in range(len(federation))]
    # the logistic loss has a second derivative of at most 1/4, and s/(1 + s) of s = |u|^2 a Hessian of at most 2
    L = max(float(torch.linalg.eigvalsh(x.T @ x / len(x))[-1]) for x in rows) / 4 + 2 * settings["rho"]
    gap = math.log(2)  # at zero, where all start, the loss is log 2, and it is never negative
    n, K, some = len(rows), settings["steps"], settings["cohort"]
    out = []
    for T in settings["T"]:
        shape: dict[str, Any] = {"L": L, "K": K, "m": some, "n": n}
        steps = partial.fedavgp_partial(**shape)
        seen = looks(ft.FedAvgP(steps=K, personal=["features"], **steps.options), {**settings, "rounds": T}, seed, some)
        b2 = max(partial.dissimilarity(look.by_u) for look in seen)
        bound = partial.fedavgp_partial_bound(steps, **shape, T=T, gap=gap, b2=b2, **QUIET)
        out.append({"T": T, "case": SOME, "norm": mean(seen[:T], some / n), "bound": bound})

        steps = partial.scaffoldp_partial(**shape)
        method = ft.ScaffoldP(steps=K, personal=["features"], **steps.options)
        bound = partial.scaffoldp_partial_bound(steps, **shape, T=T, gap=gap, **QUIET)
        called = looks(method, {**settings, "rounds": T + 1}, seed, some)[1 : T + 1]  # the roll call is a round before
        out.append({"T": T, "case": SCAFFOLD, "norm": mean(called, some / n), "bound": bound})

        start2 = float((seen[0].by_u ** 2).sum(1).mean())
        full: dict[str, Any] = {"L": L, "K": K, "n": n, "T": T, "gap": gap, "start2": start2}
        steps = partial.fedavgp_full(**full)
        seen = looks(ft.FedAvgP(steps=K, personal=["features"], **steps.options), {**settings, "rounds": T}, seed, n)
        bound = partial.fedavgp_full_bound(steps, **full, **QUIET)
        out.append({"T": T, "case": ALL, "norm": mean(seen[:T], 1.0), "bound": bound})
    return out


def mean(seen: list[Any], share: float) -> float:
    """Return the mean over rounds of the squared gradient."""
    return float(np.mean([look.norm(share) for look in seen]))


def over_bound(rows: Rows, case: str) -> float:
    """Return the largest ratio of what was measured to what the theorem allows."""
    return float((column(rows, "norm", case=case) / column(rows, "bound", case=case)).max())


def power(rows: Rows, case: str) -> float:
    """Return the power of T in the mean squared gradient."""
    return slope(column(rows, "T", case=case), column(rows, "norm", case=case))


EXPERIMENT = Experiment(
    "Mean squared gradient with the theorems' steps",
    "Theorems 3.7, 3.11 and 4.5",
    {"laptop": {**LAPTOP, "every": 1, "T": [25, 100, 400]}, "paper": {**PAPER, "every": 1, "T": [100, 1000, 10000]}},
    measure,
    Figure("T", "norm", "case", "rounds T", "mean squared gradient (dashed: the bound)", log_x=True, log_y=True, bound="bound"),
    (
        Claim("Theorem 3.7 holds (largest share of the bound)", lambda rows: over_bound(rows, SOME), below=1.0),
        Claim("Theorem 3.11 holds (largest share of the bound)", lambda rows: over_bound(rows, ALL), below=1.0),
        Claim("Theorem 4.5 holds (largest share of the bound)", lambda rows: over_bound(rows, SCAFFOLD), below=1.0),
        Claim(
            "FedAvg-P with all clients falls with T (power)", lambda rows: power(rows, ALL), below=0.0, theirs="-1 in the bound"
        ),
        Claim("Scaffold-P falls with T (power)", lambda rows: power(rows, SCAFFOLD), below=0.0, theirs="-1 in the bound"),
        *(
            Claim(
                f"{case}: the fitted power of T is the declared one, within a quarter",
                lambda rows, case=case: power(rows, case),  # type: ignore[misc]
                above=DECLARED - 0.25,
                below=DECLARED + 0.25,
                theirs=f"{DECLARED:g}",
                must=False,
            )
            for case in (SOME, ALL, SCAFFOLD)
        ),
        *(
            Claim(
                f"{case}: the bound itself has that power, within a quarter",
                lambda rows, case=case: slope(column(rows, "T", case=case), column(rows, "bound", case=case)),  # type: ignore[misc]
                above=DECLARED - 0.25,
                below=DECLARED + 0.25,
                theirs=f"{DECLARED:g}",
                must=False,
            )
            for case in (ALL, SCAFFOLD)
        ),
    ),
)
