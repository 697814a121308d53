"""FedSim: shared and personal parameters trained together.

What it does
    K simultaneous SGD steps on (u, v_i); u is averaged, v_i stays with the client.
Reference
    Pillutla et al. 2022 (FedSim); PARTIAL section 3.1 with both outer steps 1.
Differs from the paper
    Nothing known.
Limits
    FedAvgP with server_lr = personal_server_lr = 1.
When to use
    As the plain way to personalise any part of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor.algorithms.base import Limit
from fedtailor.algorithms.partial import Partial, jointly


@dataclass(frozen=True, kw_only=True)
class FedSim(Partial):
    needs_both = False
    limits = (Limit({}, "FedAvgP", exact=False, also={"server_lr": 1.0, "personal_server_lr": 1.0, "personal_lr": None}),)

    def client_update(self, task, shared, personal, data, rnd):
        return jointly(self, task, shared, personal, data, rnd)
