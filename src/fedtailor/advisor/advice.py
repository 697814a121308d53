"""Advice: what ``advise`` gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import written
from fedtailor.metrics.verdict import Lead, Verdict
from fedtailor.theory.heterogeneity import Heterogeneity


@dataclass(frozen=True, eq=False)
class Advice:
    """An advice: what to do, and why. ``algorithm`` is ready for ``ft.run``; ``text`` says it all in words.

    ``regime`` is ``local``, ``shared``, ``between`` or ``clusters``; ``lam`` the pull towards the shared model (0 alone, infinity
    one model), ``steps_used`` gradient steps spent on finding out, over all clients. ``lams`` has a lam for every client where
    they have very different amounts of data: ``FedCLUP(lam="client")`` on ``federation.with_facts(lam=advice.lams)``.
    ``spread`` is how far apart the clients' true parameters are (MINIMAX's R^2), ``verdict`` whether learning together helps on
    validation rows, ``headline`` what to do in a sentence, ``lead`` how far the best method of the race is ahead of the next.
    ``inside`` says for every group how far apart its clients are and how much they should share.
    """

    algorithm: Algorithm
    collaborate: bool
    regime: str
    lam: float
    theory_lam: float | None
    spread: float | None
    spread_interval: tuple[float, float] | None
    heterogeneity: Heterogeneity | None
    clusters: int
    groups: tuple[int, ...]
    inside: tuple[Mapping[str, Any], ...]
    lams: Mapping[str, float]
    steps_used: int
    rounds: int
    bytes_total: int
    gains: Mapping[str, float]
    race: list[Mapping[str, Any]]
    text: str = ""
    notes: tuple[str, ...] = field(default=())
    verdict: Verdict | None = None
    headline: str = ""
    lead: Lead | None = None

    @property
    def r2(self) -> float | None:
        """The spread under its earlier name."""
        return self.spread

    @property
    def r2_interval(self) -> tuple[float, float] | None:
        """The interval of the spread under its earlier name."""
        return self.spread_interval

    def __repr__(self) -> str:
        return f"Advice({written(self.algorithm)}, regime={self.regime!r}, collaborate={self.collaborate})"

    def json(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return {
            "algorithm": written(self.algorithm),
            "collaborate": self.collaborate,
            "regime": self.regime,
            "lam": None if np.isinf(self.lam) else self.lam,
            "theory_lam": None if self.theory_lam is None or np.isinf(self.theory_lam) else self.theory_lam,
            "spread": self.spread,
            "spread_interval": None if self.spread_interval is None else list(self.spread_interval),
            "r2": self.spread,  # its earlier name
            "r2_interval": None if self.spread_interval is None else list(self.spread_interval),
            "heterogeneity": None if self.heterogeneity is None else self.heterogeneity.json(),
            "clusters": self.clusters,
            "groups": list(self.groups),
            "inside": [dict(group) for group in self.inside],
            "lams": dict(self.lams),
            "steps_used": self.steps_used,
            "rounds": self.rounds,
            "bytes_total": self.bytes_total,
            "gains": {client: gain if np.isfinite(gain) else None for client, gain in self.gains.items()},
            "race": list(self.race),
            "notes": list(self.notes),
            "verdict": None if self.verdict is None else self.verdict.json(),
            "headline": self.headline,
            "lead": None if self.lead is None else self.lead.json(),
            "text": self.text,
        }
