"""What a method says about single rows (``Algorithm.diagnose``), condensed: a few quantiles by group of rows, not the rows.

A row's group is which of a method's two models gets it right: both, only the shared one, only the personal one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.task.kinds import kind_of
from fedtailor.task.scores import auc

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Numbers = NDArray[np.float64]


def spread_of(kind: str, q: Numbers, mine: Numbers, theirs: Numbers, kinds: NDArray[np.bool_] | None = None) -> dict[str, Any]:
    """Condense q [rows, places] to its mean by place, ``groups`` with rows, mean and quantiles by place and, with known ``kinds``
    (True: of the common law), the ``kind_auc`` of each place's q: how well it separates the kinds; 0.5 is a coin, None with one
    kind only. ``mine`` and ``theirs`` say which rows the personal and the shared model get right; groups are for classes only."""
    groups = {"all": np.ones(len(q), bool)}
    if kind_of(kind).softmax and mine.shape == q.shape[:1]:
        a, b = mine > 0, theirs > 0
        groups |= {"both_correct": a & b, "global_only": b & ~a, "personal_only": a & ~b}
    out: dict[str, Any] = {"mean": q.mean(0).tolist(), "groups": {name: _quantiles(q[rows]) for name, rows in groups.items()}}
    if kinds is not None:
        real = np.ones((1, len(q)), bool)
        areas = [float(auc(q[None, :, [j]], kinds[None, :, None], real)[0]) for j in range(q.shape[1])]
        out["kind_auc"] = [None if np.isnan(area) else area for area in areas]
    return out


def _quantiles(q: Numbers) -> dict[str, Any]:
    if not len(q):
        return {"rows": 0, "mean": None, "quantiles": None}
    return {"rows": len(q), "mean": q.mean(0).tolist(), "quantiles": np.quantile(q, QUANTILES, axis=0).T.tolist()}
