"""APFL: a personal model mixed with the shared one.

What it does
    Each step moves the local copy w of the shared model by its gradient, and v_i by lr alpha times the gradient *at the mixture*
    alpha v_i + (1 - alpha) w. With ``adaptive`` alpha moves too, by alpha_lr <v_i - w, gradient at the mixture>, within [0, 1].
    w is sent; the client predicts with the mixture of v_i and the shared model.
Reference
    Deng et al. 2020 (APFL), Algorithm 1 and equation for alpha.
Differs from the paper
    Weights are mixed, as in the paper (the authors' code mixes outputs). Both gradients are taken before the step; alpha moves in
    every step; no hidden term in its gradient.
Limits
    alpha = 0 is FedAvg, alpha = 1 is Local.
When to use
    When the right degree of personalisation differs from client to client (adaptive).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, param
from fedtailor.local import gradient_on, scan


@dataclass(frozen=True, kw_only=True)
class APFL(Algorithm):
    alpha: float = param(0.5, ge=0, le=1)  # 1 = personal
    adaptive: bool = False
    alpha_lr: float = param(0.01, gt=0)

    family = "a personal model tied to the shared one"
    limits = (
        Limit({"alpha": 0.0, "adaptive": False}, "FedAvg", exact=False),
        Limit({"alpha": 1.0, "adaptive": False}, "Local", exact=False),
    )
    leak = "it steps by plain gradients of two mixed models"

    def init_server(self, task):
        return {"model": task.init()}, {}

    def init_client(self, task, shared, data):
        like = next(iter(shared["model"].values()))
        return {"model": shared["model"], "alpha": torch.as_tensor(self.alpha, dtype=like.dtype, device=like.device)}

    def client_update(self, task, shared, personal, data, rnd):
        lr = self.optimizer(rnd).lr

        def step(carry, batch):
            w, v, alpha = carry["w"], carry["v"], carry["alpha"]
            eta = lr(batch["step"]) if callable(lr) else lr
            at_w, at_mix = gradient_on(task.risk, w, batch), gradient_on(task.risk, tree.mix(w, v, alpha), batch)
            if self.adaptive:
                slope = tree.dot(tree.trainable(tree.sub(v, w)), tree.trainable(at_mix))
                new_alpha = (alpha - self.alpha_lr * slope).clamp(0, 1)
            else:
                new_alpha = alpha
            w, v = tree.move(w, tree.scale(at_w, -1.0), eta), tree.move(v, tree.scale(at_mix, -1.0), eta * alpha)
            return {"w": w, "v": v, "alpha": new_alpha}

        end = scan(step, {"w": shared["model"], "v": personal["model"], "alpha": personal["alpha"]}, data)
        return {"delta": tree.sub(end["w"], shared["model"])}, {"model": end["v"], "alpha": end["alpha"]}

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.add(shared["model"], upload["delta"])}, server

    def predict(self, task, shared, personal, x):
        return task.apply(tree.mix(shared["model"], personal["model"], personal["alpha"]), x)
