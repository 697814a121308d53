"""Who takes part in a round."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedtailor.data import rng
from fedtailor.errors import InvalidArgument


def cohort_size(cohort: float | int, clients: int) -> int:
    """Return the number of clients that a share (up to 1) or a number of clients (from 2 on) comes to."""
    if cohort <= 1:
        return max(1, round(cohort * clients))
    if cohort > clients:
        raise InvalidArgument(f"cohort={cohort} is more than the {clients} clients there are; use at most {clients}")
    return int(cohort)


def sample(clients: int, size: int, seed: int, round: int) -> NDArray[np.int64]:
    """``size`` of ``clients`` positions without replacement, sorted; the cost does not depend on ``clients``."""
    if size >= clients:
        return np.arange(clients)
    drawn = rng.generator(seed, "cohort", round).choice(clients, size, replace=False, shuffle=False)
    return np.sort(drawn).astype(np.int64)
