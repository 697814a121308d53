"""FedYogi: Adam on the server with a second moment that grows slowly.

What it does
    m as FedAdam; v <- v - (1 - beta2) delta^2 sign(v - delta^2); w <- w + server_lr m / (sqrt(v) + tau).
Reference
    Reddi et al. 2021, Algorithm 2 (FedYogi).
Differs from the paper
    Nothing known (from memory: m starts at 0, v at tau^2, no bias correction).
Limits
    With beta2 = 0 and v < delta^2 its second moment is v + delta^2, FedAdam's is delta^2.
When to use
    As FedAdam, where updates are sparse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtailor import tree
from fedtailor.algorithms.base import param
from fedtailor.algorithms.fedopt import ServerOptimizer, adaptive, moments


@dataclass(frozen=True, kw_only=True)
class FedYogi(ServerOptimizer):
    server_lr: float = param(0.1, gt=0)
    beta1: float = param(0.9, ge=0, lt=1)
    beta2: float = param(0.99, ge=0, lt=1)
    tau: float = param(1e-3, gt=0)

    def init_memory(self, model):
        return moments(model, self.tau)

    def step(self, memory, delta):
        m = tree.mix(delta, memory["m"], self.beta1)
        square = tree.map(torch.square, delta)
        v = tree.map(lambda old, new: old - (1 - self.beta2) * new * torch.sign(old - new), memory["v"], square)
        return adaptive(m, v, self.server_lr, self.tau)
