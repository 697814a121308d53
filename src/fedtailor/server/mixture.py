"""The best mixture: a quadratic program on the simplex, solved exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUND_OFF = 1e-12


def best_mixture(cost: NDArray[Any]) -> NDArray[np.float64]:
    """Return the a >= 0 with sum one that minimises a' cost a, for a positive semidefinite ``cost``.

    Up to its scale, a minimises u' cost u - 2 sum(u) over u >= 0; that is solved by the active sets of Lawson and Hanson. A share
    of 1e-12 of its mean diagonal is added to ``cost``, so that the minimiser is one.
    """
    n, scale = len(cost), float(np.trace(cost)) / len(cost)
    cost = np.asarray(cost, np.float64) / (scale or 1.0) + ROUND_OFF * np.eye(n)
    u, free = np.zeros(n), np.zeros(n, bool)
    for _ in range(10 * n):  # no active set occurs twice, and few occur at all
        slope = np.where(free, -np.inf, 1 - cost @ u)
        if slope.max() <= ROUND_OFF:
            break
        free[slope.argmax()] = True
        while True:
            target = np.zeros(n)
            target[free] = np.linalg.solve(cost[np.ix_(free, free)], np.ones(free.sum()))
            negative = free & (target <= 0)
            if not negative.any():
                u = target
                break
            u = u + (u[negative] / (u[negative] - target[negative])).min() * (
                target - u
            )  # as far as the border, where one share becomes zero
            free &= u > ROUND_OFF * u.max()
            u[~free] = 0
    return u / u.sum()
