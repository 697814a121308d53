"""FedBN: normalisation layers stay at home.

What it does
    As FedAvg for all but the norms, whose parameters and statistics are the client's own.
Reference
    Li et al. 2021 (FedBN).
Differs from the paper
    Norms are found by module type (batch, layer, group, instance, RMS), not by name. A new client starts from the model's
    start for its norms and estimates them in its first round.
Limits
    FedSim with personal = "norm".
When to use
    When clients differ in their inputs' scale or style. The model must have norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedtailor.algorithms.base import Limit
from fedtailor.algorithms.partial import Partial, jointly


@dataclass(frozen=True, kw_only=True)
class FedBN(Partial):
    personal: str | Sequence[str] = "norm"

    limits = (Limit({}, "FedSim"),)

    def client_update(self, task, shared, personal, data, rnd):
        return jointly(self, task, shared, personal, data, rnd)
