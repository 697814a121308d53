"""Who takes part in a round."""

from __future__ import annotations

from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from fedtailor.data import rng
from fedtailor.errors import InvalidArgument


def cohort_size(cohort: float | int, clients: int) -> int:
    """A share in (0, 1], or a number of clients (an int above 1), as a number of clients; 1 is everyone."""
    if isinstance(cohort, bool) or not isinstance(cohort, Real) or not np.isfinite(cohort) or cohort <= 0:
        raise InvalidArgument(f"cohort must be a share in (0, 1] or a number of clients, not {cohort!r}")
    if isinstance(cohort, Integral) and cohort > 1:
        if cohort > clients:
            raise InvalidArgument(f"cohort={cohort} is more than the {clients} clients there are; use at most {clients}")
        return int(cohort)
    if cohort > 1:
        raise InvalidArgument(f"cohort={cohort} is out of range; give a share in (0, 1] or a whole number of clients")
    return max(1, round(cohort * clients))


def sample(clients: int, size: int, seed: int, round: int) -> NDArray[np.int64]:
    """``size`` of ``clients`` positions without replacement, sorted; the cost does not depend on ``clients``."""
    if size >= clients:
        return np.arange(clients)
    drawn = rng.generator(seed, "cohort", round).choice(clients, size, replace=False, shuffle=False)
    return np.sort(drawn).astype(np.int64)
