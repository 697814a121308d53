"""pFedMe: Moreau envelopes as the clients' losses.

What it does
    A client starts its w_i at the shared w. Each local step draws a batch, brings theta near the minimiser of
    risk(theta) + lam/2 ||theta - w_i||^2 on it by ``inner_steps`` steps of ``inner_lr``, and moves
    w_i by -lr lam (w_i - theta). The server mixes: w <- (1 - beta) w + beta mean w_i. The client predicts with theta.
Reference
    T. Dinh et al. 2020 (pFedMe), Algorithm 1; CLUP's and PERADA's baseline.
Differs from the paper
    The paper leaves open where the inner solver starts: here at the client's last theta (``warm_start=False``: at the
    shared model each round, as the authors' code). No hidden weight decay; only sampled clients train.
Limits
    Warm-started with one step per round it is FedCLUP with server_lr = beta lr; inner_steps to infinity solves Problem 2.
When to use
    As CLUP's baseline; FedCLUP does the same with less local work.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, param
from fedtailor.local import descend, prox, scan
from fedtailor.local.loop import repeat


@dataclass(frozen=True, kw_only=True)
class PFedMe(Algorithm):
    lam: float = param(15.0, ge=0)
    inner_lr: float = param(0.05, gt=0)
    inner_steps: int = param(5, ge=1)
    beta: float = param(1.0, gt=0)
    warm_start: bool = True

    family = "a personal model tied to the shared one"
    limits = (Limit({"lam": 0.0, "inner_steps": 1, "inner_lr": 0.1, "warm_start": True}, "Local", also={"lr": 0.1}),)

    def init_server(self, task):
        return {"model": task.init()}, {}

    def init_client(self, task, shared, data):
        return {"model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        outer_lr = self.optimizer(rnd).lr
        opt = self.optimizer(rnd, self.inner_lr)

        def step(carry, batch):
            w = carry["w"]
            theta = descend(task.risk, carry["theta"], repeat(batch, self.inner_steps), opt, prox(w, self.lam))
            eta = outer_lr(batch["step"]) if callable(outer_lr) else outer_lr
            return {"w": tree.move(w, tree.sub(theta, w), eta * self.lam), "theta": theta}

        w = shared["model"]
        theta = personal["model"] if self.warm_start else w
        carry = scan(step, {"w": w, "theta": theta}, data)
        return {"model": carry["w"]}, {"model": carry["theta"]}

    def server_update(self, task, shared, server, upload, rnd):
        w = shared["model"]
        return {"model": tree.move(w, tree.sub(upload["model"], w), self.beta)}, server

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)
