"""Record: what a run measured, as numbers and words only. It is what reports and tables are made of, live or from disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Record:
    """A finished run without its parameters.

    ``rounds`` has a line per round (evaluated rounds carry the measures), ``names`` and ``clients`` the measures per client of
    the last evaluation (NaN where one does not apply), ``settings`` the method as one would write it, ``options`` the run's.
    """

    label: str
    kind: str  # classification | regression | multilabel
    summary: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    clients: Mapping[str, NDArray[np.float64]]
    settings: str
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()  # what was assumed about the data
    tuning: Mapping[str, Any] | None = None  # the grid, the scores on validation and the choice
