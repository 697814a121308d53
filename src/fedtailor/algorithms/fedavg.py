"""FedAvg: one model for all, averaged after local work.

What it does
    Sampled clients run SGD from the shared model; the server moves by the weighted mean of their deltas.
Reference
    McMahan et al. 2017, Algorithm 1; MINIMAX Algorithm 1 (``server_lr`` is its global step).
Differs from the paper
    With weights by size and partial turnout the mean is normalised over the cohort (McMahan), not multiplied by
    m n_i / (N |C|) (MINIMAX); the two agree for uniform weights and for full turnout.
Limits
    FedProx with mu = 0 is this method.
When to use
    When clients are alike (R^2 below m/N), or as the start of fine-tuning.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, param
from fedtailor.local import descend


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    server_lr: float = param(1.0, gt=0)

    family = "one model for all"
    yardstick = "together"

    def init_server(self, task):
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        model = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"delta": tree.sub(model, shared["model"])}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.move(shared["model"], upload["delta"], self.server_lr)}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)
