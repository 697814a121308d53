"""FedAdam: Adam on the server.

What it does
    m <- beta1 m + (1 - beta1) delta; v <- beta2 v + (1 - beta2) delta^2; w <- w + server_lr m / (sqrt(v) + tau).
Reference
    Reddi et al. 2021, Algorithm 2 (FedAdam).
Differs from the paper
    Nothing known (from memory: m starts at 0, v at tau^2, no bias correction).
Limits
    tau large: momentum SGD with step server_lr / tau.
When to use
    When parameters need very different step sizes (embeddings, text).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtailor import tree
from fedtailor.algorithms.base import param
from fedtailor.algorithms.fedopt import ServerOptimizer, adaptive, moments


@dataclass(frozen=True, kw_only=True)
class FedAdam(ServerOptimizer):
    server_lr: float = param(0.1, gt=0)
    beta1: float = param(0.9, ge=0, lt=1)
    beta2: float = param(0.99, ge=0, lt=1)
    tau: float = param(1e-3, gt=0)

    def init_memory(self, model):
        return moments(model, self.tau)

    def step(self, memory, delta):
        m = tree.mix(delta, memory["m"], self.beta1)
        v = tree.mix(tree.map(torch.square, delta), memory["v"], self.beta2)
        return adaptive(m, v, self.server_lr, self.tau)
