"""FedDF: the server distils the clients' ensemble into the shared model on unlabelled public data.

What it does
    Rounds as FedAvg; then the averaged model is trained by Adam to match softmax(mean of the clients' logits / T) on the public
    rows: ``kd_steps`` steps on consecutive batches of ``kd_batch`` rows.
Reference
    Lin et al. 2020 (FedDF), with logits averaged.
Differs from the paper
    No early stopping and no labelled validation gate (a fixed number of steps); teachers and student in evaluation mode; no
    schedule.
Limits
    kd_steps = 0 is FedAvg.
When to use
    When unlabelled data like the clients' may be used by the server. The server sees every upload: not for secure aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtailor.algorithms.base import Algorithm, Limit, param
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend
from fedtailor.server.distill import Teachers, distill


@dataclass(frozen=True, kw_only=True)
class FedDF(Algorithm):
    kd_steps: int = param(50, ge=0)
    kd_lr: float = param(1e-3, gt=0)
    kd_batch: int = param(128, ge=1)
    temperature: float = param(1.0, gt=0)

    family = "one model for all"
    limits = (Limit({"kd_steps": 0}, "FedAvg", exact=False, also={"server_lr": 1.0}),)

    def init_server(self, task):
        if task.public is None:
            raise InvalidArgument("FedDF needs public rows to distil on; give the federation public=")
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        return {"model": descend(task.risk, shared["model"], data, self.optimizer(rnd))}, personal

    def reducer(self, task, shared, rnd):
        return Teachers(task, task.public, lambda upload: upload["model"], "logits", self.temperature)

    def server_update(self, task, shared, server, upload, rnd):
        index = np.arange(self.kd_steps)[:, None] * self.kd_batch + np.arange(min(self.kd_batch, len(task.public)))
        index %= len(task.public)
        target = upload["teachers"]["target"]
        return {"model": distill(task, upload["model"], task.public, target, index, self.kd_lr, self.temperature)}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)
