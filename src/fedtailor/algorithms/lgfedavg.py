"""LG-FedAvg: the body is personal, the head is shared.

What it does
    The inverse split of FedPer: each client has its own representation, the top layers are averaged.
Reference
    Liang et al. 2020 (LG-FedAvg).
Differs from the paper
    Starts from the model's start; the authors start from a trained FedAvg model (give one as the module's weights). The mean is
    weighted as asked, theirs is plain.
Limits
    FedSim with personal = "body".
When to use
    When clients see the same labels through different instruments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedtailor.algorithms.base import Limit
from fedtailor.algorithms.partial import Partial, jointly


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(Partial):
    personal: str | Sequence[str] = "body"

    limits = (Limit({}, "FedSim"),)

    def client_update(self, task, shared, personal, data, rnd):
        return jointly(self, task, shared, personal, data, rnd)
