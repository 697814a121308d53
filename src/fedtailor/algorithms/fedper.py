"""FedPer: the head is personal.

What it does
    As FedSim with the last layer personal: body and head are trained together, the body is averaged.
Reference
    Arivazhagan et al. 2019 (FedPer).
Differs from the paper
    ``personal`` may name any part.
Limits
    FedSim with personal = "head".
When to use
    When clients label the same features differently.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor.algorithms.base import Limit
from fedtailor.algorithms.partial import Partial, jointly


@dataclass(frozen=True, kw_only=True)
class FedPer(Partial):
    limits = (Limit({}, "FedSim"),)

    def client_update(self, task, shared, personal, data, rnd):
        return jointly(self, task, shared, personal, data, rnd)
