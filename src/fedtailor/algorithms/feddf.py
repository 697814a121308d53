"""FedDF: the server distils the clients' ensemble into the shared model on unlabelled public data.

What it does
    Rounds as FedAvg; then the averaged model is trained by Adam to match softmax(mean of the clients' logits / T) on the public
    rows: ``kd_steps`` steps on consecutive batches of ``kd_batch`` rows.
Reference
    Lin et al. 2020 (FedDF), with logits averaged.
Differs from the paper
    No early stopping and no labelled validation gate (a fixed number of steps); teachers in evaluation mode; no schedule.
Limits
    kd_steps = 0 is FedAvg.
When to use
    When unlabelled data like the clients' may be used by the server. The server sees every upload: not for secure aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.func import grad

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, param
from fedtailor.errors import InvalidArgument
from fedtailor.local import Adam, descend


@dataclass(frozen=True, kw_only=True)
class FedDF(Algorithm):
    kd_steps: int = param(50, ge=0)
    kd_lr: float = param(1e-3, gt=0)
    kd_batch: int = param(128, ge=1)
    temperature: float = param(1.0, gt=0)

    reduce = "stack"
    limits = (Limit({"kd_steps": 0}, "FedAvg", exact=False, also={"server_lr": 1.0}),)

    def init_server(self, task):
        if task.public is None:
            raise InvalidArgument("FedDF needs public rows to distil on; give the federation public=")
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        return {"model": descend(task.risk, shared["model"], data, self.optimizer(rnd))}, personal

    def server_update(self, task, shared, server, upload, rnd):
        teachers = upload["model"]
        share = rnd.weights.to(next(iter(teachers.values())))
        start = tree.map(lambda leaf: torch.tensordot(share, leaf, 1), teachers)
        return {"model": self.distil(task, start, teachers)}, server

    def distil(self, task, student, teachers):
        count = len(next(iter(teachers.values())))
        opt, names = Adam(lr=self.kd_lr), [name for name in student if not tree.is_buffer(name)]
        own = {name: leaf.clone() for name, leaf in student.items()}
        state = opt.init([own[name] for name in names])
        with torch.no_grad():
            logits = sum(task.apply({k: leaf[i] for k, leaf in teachers.items()}, task.public) for i in range(count)) / count
            target = torch.softmax(logits / self.temperature, -1)

        def gap(part, rows):
            out = torch.log_softmax(task.apply({**own, **part}, task.public[rows]) / self.temperature, -1)
            return -(target[rows] * out).sum(-1).mean()  # KL up to a constant

        for s in range(self.kd_steps):
            rows = (torch.arange(min(self.kd_batch, len(target))) + s * self.kd_batch) % len(target)
            found = grad(gap)({name: own[name] for name in names}, rows)
            leaves = [own[name] for name in names]
            opt.step_(leaves, [found[name] for name in names], state, s, [False] * len(names), [1.0] * len(names), stacked=False)
        return own

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)
