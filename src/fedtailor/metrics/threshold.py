"""The probability from which on a row is of the second class, chosen on validation rows, and what it gives on test rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
MEASURES = ("f1", "balanced_accuracy", "accuracy")


def choose(measure: str, probability: Numbers, positive: NDArray[np.bool_]) -> float | None:
    """Return the threshold in (0, 1) with the best measure on these rows, halfway between two probabilities; of equally good ones
    the one nearest to a half. None where one class is missing."""
    if not positive.any() or positive.all():
        return None
    order = np.argsort(-probability, kind="stable")
    p, hit = probability[order], positive[order]
    cuts = np.flatnonzero(np.diff(p) < 0)  # between a row and the next
    middle = (p[cuts] + p[cuts + 1]) / 2
    thresholds = np.concatenate([[(1 + p[0]) / 2], middle, [p[-1] / 2]])
    said = np.concatenate([[0], cuts + 1, [len(p)]])
    right = np.concatenate([[0], np.cumsum(hit)])[said]
    values = np.array([_measures(r, s, hit.sum(), len(hit))[measure] for r, s in zip(right, said, strict=True)])
    best = np.flatnonzero(values >= values.max() - 1e-12)
    return float(thresholds[best[np.abs(thresholds[best] - 0.5).argmin()]])


def at(threshold: float, probability: Numbers, positive: NDArray[np.bool_]) -> dict[str, Any]:
    """Return the measures of saying the second class from the threshold on."""
    said = probability >= threshold
    return _measures(int((said & positive).sum()), int(said.sum()), int(positive.sum()), len(positive))


def _measures(right: int, said: int, true: int, rows: int) -> dict[str, Any]:
    negative, true_negatives = rows - true, rows - true - (said - right)
    sensitivity = right / true if true else None
    specificity = true_negatives / negative if negative else None
    known = [value for value in (sensitivity, specificity) if value is not None]
    return {
        "accuracy": (right + true_negatives) / rows,
        "f1": 2 * right / (said + true) if said + true else 0.0,
        "balanced_accuracy": sum(known) / len(known),
        "sensitivity": sensitivity,
        "specificity": specificity,
    }
