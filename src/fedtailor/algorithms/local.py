"""Local training: every client for itself.

What it does
    SGD on the client's own data, round after round; nothing is sent.
Reference
    MINIMAX, PureLocalTraining, problem (3); CLUP Problem (2) with lambda = 0.
Differs from the paper
    Work is cut into rounds so that it can be compared at equal local steps; a client steps when it is sampled.
Limits
    FedCLUP, Ditto and FedProxPersonal with lam = 0 are this method.
When to use
    As the yardstick; and as the method when heterogeneity exceeds m/N (MINIMAX's dichotomy).
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor.algorithms.base import Algorithm
from fedtailor.local import descend


@dataclass(frozen=True, kw_only=True)
class Local(Algorithm):
    family = "alone"
    yardstick = "alone"

    def init_server(self, task):
        return {}, {}

    def init_client(self, task, shared, data):
        return {"model": task.init()}

    def client_update(self, task, shared, personal, data, rnd):
        return {}, {"model": descend(task.risk, personal["model"], data, self.optimizer(rnd))}

    def server_update(self, task, shared, server, upload, rnd):
        return shared, server

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)
