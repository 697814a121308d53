"""Privacy of several runs on the same rows (methods, seeds, trials of tuning): what they release together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedtailor.engine.prepare import Prepared
from fedtailor.engine.private import deltas, parts, spends
from fedtailor.engine.setup import visits_of
from fedtailor.privacy.accountant import Spend, epsilons


class Ledger:
    """Every private run that looked at the clients' rows; ``total`` is what a client has spent in all of them."""

    def __init__(self) -> None:
        self.runs = 0
        self._spends: dict[str, list[tuple[Spend, float]]] = {}  # with the noise of each, by client
        self._delta: dict[str, float] = {}
        self._accountant = "rdp"

    def add(self, ready: Prepared) -> None:
        """Charge a run, wholly, to its clients; of a client whose rows are in parts, the part that spends most."""
        plan, opt = ready.plan, ready.algorithm.opt.privacy
        if opt is None:
            return
        self.runs += 1
        self._accountant = "prv" if opt.accountant == "prv" else self._accountant
        names, delta = plan.federation.names, deltas(plan)
        entries = spends(plan, visits_of(plan, ready.options.rounds, ready.size))
        owners = [client for client, _ in parts(plan)]
        each = epsilons(entries, opt.multiplier, [delta[client] for client in owners], opt.accountant)
        worst: dict[int, tuple[float, list[Spend]]] = {}
        for client, value, entry in zip(owners, each, entries, strict=True):
            if client not in worst or value > worst[client][0]:
                worst[client] = value, entry
        for client, (_, entry) in worst.items():
            self._spends.setdefault(names[client], []).extend((spend, opt.multiplier) for spend in entry)
            self._delta[names[client]] = min(delta[client], self._delta.get(names[client], 1.0))

    def total(self) -> dict[str, Any]:
        """Return epsilon over all runs, of the client that spends most and on average; nothing where no run was private."""
        if not self.runs:
            return {}
        noises = [noise for own in self._spends.values() for _, noise in own]
        if not all(noises):
            return {"epsilon_composed": None, "epsilon_composed_mean": None}
        base = min(noises)
        # a release with k times the noise is worth 1/k^2 of one: Gaussian mechanisms on one sample compose by squares
        scaled = [[Spend(s.q, s.steps, s.releases * (base / noise) ** 2) for s, noise in own] for own in self._spends.values()]
        values = epsilons(scaled, base, list(self._delta.values()), self._accountant)
        bounded = all(map(math.isfinite, values))
        worst, average = (max(values), float(np.mean(values))) if bounded else (None, None)
        return {"epsilon_composed": worst, "epsilon_composed_mean": average}
