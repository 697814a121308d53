"""Ditto: a shared model by FedAvg and, beside it, a personal model pulled towards it.

What it does
    A sampled client runs SGD from the received w and sends the delta; beside that it moves its own v_i by SGD on
    risk + lam/2 ||v - w||^2 with w as received. It predicts with v_i.
Reference
    Li et al. 2021 (Ditto), Algorithm 1.
Differs from the paper
    Both branches walk through the same batches unless ``personal_steps`` or ``personal_epochs`` is given. The pull is
    towards the model received, never towards the moving local copy.
Limits
    The shared model is FedAvg's; lam = 0 is Local.
When to use
    When a good global model is wanted as well; it trains two models and sends one.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.local import descend, prox


@dataclass(frozen=True, kw_only=True)
class Ditto(Algorithm):
    lam: float = param(0.1, ge=0)
    server_lr: float = param(1.0, gt=0)
    personal_lr: float | None = param(None, gt=0)  # lr if not given
    personal_steps: int | None = param(None, ge=1)
    personal_epochs: int | None = param(None, ge=1)

    family = "a personal model tied to the shared one"
    limits = (
        Limit({"lam": 0.0, "personal_lr": None, "personal_steps": None, "personal_epochs": None}, "Local"),
        Limit({}, "FedAvg", compares="shared"),
    )

    def work(self):
        train = super().work()
        if self.personal_steps is None and self.personal_epochs is None:
            return train
        return {**train, "personal": amount(self.personal_steps, self.personal_epochs)}

    def init_server(self, task):
        return {"model": task.init()}, {}

    def init_client(self, task, shared, data):
        return {"model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        w = shared["model"]
        model = descend(task.risk, w, data, self.optimizer(rnd))
        personal_data = data["personal"] if "personal" in self.work() else data
        v = descend(task.risk, personal["model"], personal_data, self.optimizer(rnd, self.personal_lr), prox(w, self.lam))
        return {"delta": tree.sub(model, w)}, {"model": v}

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.move(shared["model"], upload["delta"], self.server_lr)}, server

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)
