"""What Eq. (5) leaves of the shared model's update, over the probability of the global path."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtailor as ft
from fedtailor import tree
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column, one, slope

MIXED, OWN = "w by the mixed risk, Eq. (5)", "w by its own risk"


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """After some rounds of FedAvg, one round with a fixed q0 in all layers: the averaged update of w, projected on that of its
    own risk on the same rows and steps."""
    fed = ft.Federation.load("instances", clients=settings["clients"], seed=seed, **settings["law"])
    warmup = settings["warmup"]
    how: dict[str, Any] = {"batch_size": 20, "evaluate_every": 0, "engine": "vectorized", "seed": seed, "dtype": "float64"}

    def model(rounds: int, **options: Any) -> Any:
        method = ft.Flow(lr=settings["lr"], local_epochs=5, warmup=warmup, **options)
        return ft.run(method, fed, settings["model"], rounds=rounds, **how).shared["model"]

    start = model(warmup, q0=0.5)
    own = tree.sub(model(warmup + 1, q0=0.5, global_risk="own"), start)
    out = []
    for q0 in settings["q0"]:
        update = tree.sub(model(warmup + 1, q0=q0), start)
        left = float(tree.dot(update, own) / tree.dot(own, own))
        out += [{"q0": q0, "risk": MIXED, "projection": left}, {"q0": q0, "risk": OWN, "projection": 1.0}]
    return out


def falls(rows: Rows) -> float:
    """Return the least rise of the projection from one q0 to the next."""
    return float(np.diff(column(rows, "projection", risk=MIXED)).min())


LAPTOP = {
    "clients": 20,
    "law": {"share": 0.5, "rows": 120, "visible": 4.0},
    "model": "mlp:32",
    "lr": 0.3,
    "warmup": 20,
    "q0": [0.1, 0.3, 0.5, 0.7, 0.9],
}
EXPERIMENT = Experiment(
    "What Eq. (5) leaves of the shared model's update",
    "Equation (5)",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "clients": 300, "warmup": 200}},
    measure,
    Figure("q0", "projection", "risk", "probability of the global path", "projection on the update of w's own risk"),
    (
        Claim("The update shrinks with q0 (least rise)", falls, above=0.0, must=False),
        Claim("At q0 = 0.1 less than a third is left", lambda rows: one(rows, "projection", q0=0.1, risk=MIXED), below=1 / 3,
              must=False),
        Claim("At q0 = 0.9 more than two thirds are left", lambda rows: one(rows, "projection", q0=0.9, risk=MIXED), above=2 / 3,
              must=False),
        Claim("It shrinks about as q0 does, or faster (power)",
              lambda rows: slope(column(rows, "q0", risk=MIXED), np.maximum(column(rows, "projection", risk=MIXED), 1e-3)),
              above=0.8, must=False, theirs="1 where the model is one layer and v = w"),
    ),
    convex=False,
)  # fmt: skip
