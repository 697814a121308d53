"""FedRep: a shared representation, many steps on the personal head, few on the body.

What it does
    A client trains its head for ``personal_epochs`` with the body as received, then the body for one pass with the new head
    fixed; the body is averaged.
Reference
    Collins et al. 2021 (FedRep), Algorithm 1; ten head epochs and one body epoch as in the authors' experiments.
Differs from the paper
    A new client starts from the model's start for its head, not from an average of heads (a bug of the authors' code). Each phase
    has an optimiser of its own, so the frozen part does not drift.
Limits
    FedAlt with the same work.
When to use
    When clients share features but not labels, and heads are small.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor.algorithms.base import Limit, amount, param
from fedtailor.algorithms.partial import Partial, alternately


@dataclass(frozen=True, kw_only=True)
class FedRep(Partial):
    personal_lr: float | None = param(None, gt=0)  # lr if not given
    personal_steps: int | None = param(None, ge=1)
    personal_epochs: int | None = param(None, ge=1)  # 10 if neither is given

    limits = (Limit({"personal_steps": 3, "personal_epochs": None}, "FedAlt"),)

    def work(self):
        return {**super().work(), "personal": amount(self.personal_steps, self.personal_epochs, default=10)}

    def client_update(self, task, shared, personal, data, rnd):
        return alternately(self, task, shared, personal, data, rnd)
