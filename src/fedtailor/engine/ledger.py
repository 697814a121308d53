"""Privacy of several runs on the same rows (methods, seeds, trials of tuning): what they release together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.engine.base import Plan
from fedtailor.engine.beginning import Beginning
from fedtailor.engine.crowd import crowd_releases
from fedtailor.engine.prepare import Prepared
from fedtailor.engine.private import deltas, parts, spends
from fedtailor.engine.setup import visits_of
from fedtailor.privacy.accountant import Spend, epsilons


class Ledger:
    """Every private run that looked at the clients' rows; ``total`` is what they have spent together."""

    def __init__(self) -> None:
        self._spends: dict[str, list[tuple[Spend, float]]] = {}  # with the noise of each, by client
        self._delta: dict[str, float] = {}
        self._accountant = "rdp"
        self._members: list[tuple[Spend, float]] = []  # the same of a whole client
        self._members_delta = 1.0
        self._beginning: Beginning | None = None

    def add(self, ready: Prepared) -> None:
        """Charge a run, wholly, to its clients, and to those that were held out and met its model at the end."""
        self._beginning = ready.beginning
        if ready.plan.uses is not None:
            self._charge(ready.plan, visits_of(ready.plan, ready.options.rounds, ready.size))
        if ready.newcomers is not None and ready.newcomers.uses is not None:
            self._charge(ready.newcomers, np.ones(len(ready.newcomers.federation), np.int64))
        if ready.plan.crowd is not None:
            released, noise, delta = crowd_releases(ready.plan, ready.options)
            self._members += [(spend, noise) for spend in released]
            self._members_delta = min(delta, self._members_delta)

    def _charge(self, plan: Plan, visits: NDArray[np.int64]) -> None:
        """Charge every client; one whose rows are in parts, for the part that spends most."""
        opt = plan.algorithm.opt.privacy
        assert opt is not None
        self._accountant = "prv" if opt.accountant == "prv" else self._accountant
        names, delta = plan.federation.names, deltas(plan)
        entries = spends(plan, visits)
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
        """Return epsilon over all runs: of the client that spends most and on average, and of a whole client; nothing where no
        run was private. The run that all of them started from is counted once."""
        out: dict[str, Any] = {}
        if self._spends:
            values = _together(list(self._spends.values()), list(self._delta.values()), self._accountant)
            out["epsilon_composed"] = None if values is None else max(values)
            out["epsilon_composed_mean"] = None if values is None else float(np.mean(values))
        if self._members:
            values = _together([self._members], [self._members_delta], "prv")
            out["user_epsilon_composed"] = None if values is None else values[0]
        return out if self._beginning is None else {**out, **self._beginning.added_to(out)}


def _together(entries: Sequence[Sequence[tuple[Spend, float]]], delta: Sequence[float], accountant: str) -> list[float] | None:
    """Return epsilon of each list of (spend, its noise); None where one has no bound."""
    noises = [noise for own in entries for _, noise in own]
    if not all(noises):
        return None
    base = min(noises, default=1.0)
    # a release with k times the noise is worth 1/k^2 of one: Gaussian mechanisms on one sample compose by squares
    scaled = [[Spend(s.q, s.steps, s.releases * (base / noise) ** 2) for s, noise in own] for own in entries]
    values = epsilons(scaled, base, delta, accountant)
    return values if all(map(math.isfinite, values)) else None
