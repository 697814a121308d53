"""FedProx: FedAvg whose local work is pulled towards the model received.

What it does
    Local SGD on risk + mu/2 ||y - w||^2 from the shared model w; the server moves by the mean of the deltas.
Reference
    Li et al. 2020 (FedProx): objective with mu/2 ||y - w||^2, gradient + mu (y - w).
Differs from the paper
    Clients do a fixed amount of work (no inexactness parameter gamma); the mean is weighted as FedAvg's.
Limits
    mu = 0 is FedAvg, bit for bit.
When to use
    One model for all when local work is long and clients drift apart. For personal models see FedProxPersonal.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, param
from fedtailor.local import descend, prox


@dataclass(frozen=True, kw_only=True)
class FedProx(Algorithm):
    mu: float = param(0.1, ge=0)
    server_lr: float = param(1.0, gt=0)

    family = "one model for all"
    limits = (Limit({"mu": 0.0}, "FedAvg"),)

    def init_server(self, task):
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        w = shared["model"]
        model = descend(task.risk, w, data, self.optimizer(rnd), prox(w, self.mu))
        return {"delta": tree.sub(model, w)}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.move(shared["model"], upload["delta"], self.server_lr)}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)
