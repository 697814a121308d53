"""FedAvgM: FedAvg with momentum on the server.

What it does
    m <- beta1 m + delta; w <- w + server_lr m, delta being the mean change of a round.
Reference
    Hsu et al. 2019 (FedAvgM); Reddi et al. 2021.
Differs from the paper
    Nothing known (undamped momentum, from memory).
Limits
    beta1 = 0 is FedAvg.
When to use
    When rounds are noisy because cohorts are small.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import Limit, param
from fedtailor.algorithms.fedopt import ServerOptimizer


@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerOptimizer):
    beta1: float = param(0.9, ge=0, lt=1)

    limits = (Limit({"beta1": 0.0}, "FedAvg"),)

    def init_memory(self, model):
        return {"m": tree.zeros(model)}

    def step(self, memory, delta):
        m = tree.add(delta, memory["m"], self.beta1)
        return {"m": m}, tree.scale(m, self.server_lr)
