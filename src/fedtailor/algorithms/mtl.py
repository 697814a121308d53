"""MTL: mean-regularised multi-task learning.

What it does
    Every client has its own w_i, pulled towards the mean of all: gradient + lam (w_i - mean), the mean fixed in a round.
Reference
    Evgeniou and Pontil 2004, as in MOCHA (Smith et al. 2017): objective with lam/2 ||w_i - mean||^2 per client.
Differs from the paper
    Our lam is twice their lambda_1; no ridge (use weight decay). The mean is over the cohort of the round.
Limits
    lam = 0 is Local.
When to use
    As FedCLUP; it sends models instead of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor.algorithms.base import Algorithm, Limit, param
from fedtailor.local import descend, prox


@dataclass(frozen=True, kw_only=True)
class MTL(Algorithm):
    lam: float = param(0.1, ge=0)

    family = "a personal model tied to the shared one"
    limits = (Limit({"lam": 0.0}, "Local"),)

    def init_server(self, task):
        return {"model": task.init()}, {}

    def init_client(self, task, shared, data):
        return {"model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        w = descend(task.risk, personal["model"], data, self.optimizer(rnd), prox(shared["model"], self.lam))
        return {"model": w}, {"model": w}

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": upload["model"]}, server

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)
