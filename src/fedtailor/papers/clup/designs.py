"""Theorem 1 on many designs: rows, clients, noise and condition numbers, over lam."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column
from fedtailor.papers.clup import bound


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the rows of ``clup/bound`` for every design."""
    out = []
    for kappa, noise, clients, rows in settings["designs"]:
        design = {"kappa": kappa, "noise": noise, "clients": clients, "rows": rows}
        found = bound.measure({**settings, **design}, seed)
        name = f"kappa {kappa:g}, noise {noise:g}, {clients} clients of {rows} rows"
        out += [{**row, "design": name, "ratio": row["bound"] / row["error"]} for row in found]
    return out


def chosen(rows: Rows) -> float:
    """Return the error at the lam with the least bound over the least error: the median over designs and R."""
    parts: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        parts.setdefault((row["design"], row["R"]), []).append(row)
    return float(
        np.median([min(part, key=lambda row: row["bound"])["error"] / column(part, "error").min() for part in parts.values()])
    )


LAPTOP = {
    "R": [0.0, 0.03, 0.1, 0.3, 1.0, 3.0],
    "d": 4,
    "lams": 17,
    "designs": [[1.0, 1.0, 20, 10], [1.0, 0.3, 50, 40], [4.0, 0.5, 6, 40], [10.0, 1.0, 20, 100]],
}
EXPERIMENT = Experiment(
    "The bound over the measured error, on many designs",
    "Theorem 1",
    {"laptop": LAPTOP, "paper": LAPTOP},
    measure,
    Figure("lam", "ratio", "R", "lam", "bound over error", log_x=True, log_y=True, panel="design"),
    (
        Claim("The bound lies above the error (least ratio)", lambda rows: float(column(rows, "ratio").min()), above=1.0),
        Claim("The lam that minimises the bound is near the best (its error over the least, median)", chosen, below=2.0,
              must=False, theirs="up to constants"),
    ),
)  # fmt: skip
