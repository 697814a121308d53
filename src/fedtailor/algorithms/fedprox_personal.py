"""FedProx in two stages: a personal model per client, tied to a global one.

What it does
    Stage I (the rounds): a sampled client continues from its own w_i on risk + lam/2 ||w - g||^2; the server moves g by
    lam * server_lr * (m/|C|) * sum of p_i (w_i - g). Stage II (before predicting): every client takes the last g and does
    more such steps from its own w_i; that is its model.
Reference
    MINIMAX, Algorithm 2, problem (20).
Differs from the paper
    The listing's sampling test is printed upside down: here sampled clients train. A client is born, at the g it first
    receives, when it is first sampled. ``server_lr`` is 1/lam if not given (the server then averages). The projection
    (``radius``) acts on local iterates only, as in the listing.
Limits
    lam = 0 without Stage II is Local.
When to use
    When how much to share is to be tuned by one number; its optimum follows the better of FedAvg and Local.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.local import Schedule, descend, prox
from fedtailor.local.schedule import at


@dataclass(frozen=True, kw_only=True)
class FedProxPersonal(Algorithm):
    lam: float = param(0.5, ge=0)
    server_lr: float | Schedule | None = param(None, gt=0)
    final_steps: int | None = param(None, ge=0)  # Stage II: as much as a round if neither is given
    final_epochs: int | None = param(None, ge=0)

    family = "a personal model tied to the shared one"
    limits = (Limit({"lam": 0.0, "final_steps": 0, "final_epochs": None}, "Local"),)

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.server_lr, (int, float)) and self.lam * self.server_lr > 2:
            size = self.lam * self.server_lr
            warnings.warn(f"FedProxPersonal: lam * server_lr = {size:g} exceeds 2, the server's step diverges", stacklevel=3)

    def work(self):
        train = super().work()["train"]
        return {"train": train, "personalize": amount(self.final_steps, self.final_epochs, default=train)}

    def init_server(self, task):
        return {"model": task.init()}, {}

    def init_client(self, task, shared, data):
        return {"model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        g = shared["model"]
        model = descend(task.risk, personal["model"], data, self.optimizer(rnd), prox(g, self.lam))
        return {"delta": tree.sub(model, g)}, {"model": model}

    def server_update(self, task, shared, server, upload, rnd):
        lr = self.server_lr and at(self.server_lr, rnd.number)
        step = self.lam * lr if isinstance(lr, (int, float)) else float(self.lam > 0)  # without a pull g has no say
        return {"model": tree.move(shared["model"], upload["delta"], step * rnd.mass)}, server

    def personalize(self, task, shared, personal, data):
        pull = prox(shared["model"], self.lam)
        return {"model": descend(task.risk, personal["model"], data, self.optimizer(), pull)}

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)
