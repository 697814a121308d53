"""FedAlt: personal parameters first, then shared ones.

What it does
    A client trains v_i with u as received, then u with the new v_i fixed; u is averaged, v_i stays.
Reference
    Pillutla et al. 2022 (FedAlt).
Differs from the paper
    Weights by rows or uniform (the authors' code weighs by number of batches); no penalty on v.
Limits
    With equal work for both parts it differs from FedSim only in the order of the steps.
When to use
    As FedSim; more stable when the personal part is large.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor.algorithms.base import amount, param
from fedtailor.algorithms.partial import Partial, alternately


@dataclass(frozen=True, kw_only=True)
class FedAlt(Partial):
    personal_lr: float | None = param(None, gt=0)  # lr if not given
    personal_steps: int | None = param(None, ge=1)  # as much as for the shared part if neither is given
    personal_epochs: int | None = param(None, ge=1)

    def work(self):
        train = super().work()["train"]
        return {"train": train, "personal": amount(self.personal_steps, self.personal_epochs, default=train)}

    def client_update(self, task, shared, personal, data, rnd):
        return alternately(self, task, shared, personal, data, rnd)
