"""AL2SGD+: L2GD, accelerated and with variance reduction.

What it does
    L-Katyusha on F = (1/n) sum f_i(x_i) + lam/(2n) sum ||x_i - mean||^2. Each round is one iteration: x = theta1 z + theta2 w +
    (1 - theta1 - theta2) y; a shared coin (probability p) decides whether the estimator corrects the anchor's gradient in the
    penalty or in the data; y, z follow; with probability rho the anchor w moves to y and the full gradients are renewed.
Reference
    Hanzely et al. 2020, AL2SGD+; step sizes of L-Katyusha.
Differs from the paper
    Re-derived (the estimator's mean is the gradient of F, tested). The anchor takes the y before the step. L_F = (L + lam)/n and
    calL = max(L/(1 - p), lam/p)/n are ours, for whole local gradients; mu is that of F, mu/n.
Limits
    Reaches Problem 2's minimiser (CLUP, uniform weights) with constant steps, unlike L2GD.
When to use
    Strongly convex problems where rounds are dear and conditioning is bad. Needs mu and the smoothness of the clients' risks:
    give them, or steps="theory" for a linear model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, amount, param
from fedtailor.algorithms.l2gd import one_step
from fedtailor.errors import InvalidArgument
from fedtailor.local import gradient


@dataclass(frozen=True, kw_only=True)
class AL2SGD(Algorithm):
    lam: float = param(0.5, gt=0)
    p: float | None = param(None, gt=0, lt=1)  # lam/(lam + L) if not given
    rho: float | None = param(None, gt=0, lt=1)  # p (1 - p) if not given
    mu: float | None = param(None, gt=0)
    smoothness: float | None = param(None, gt=0)

    family = "a personal model tied to the shared one"
    has_theory = True
    needs_everyone = True
    leak = "its steps are differences of plain gradients, some over all rows"

    def __post_init__(self):
        super().__post_init__()
        one_step(self)

    @classmethod
    def example(cls):
        return cls(mu=0.1, smoothness=10.0)

    def resolve(self, problem):
        if self.steps != "theory":
            return self, None
        constants = problem.constants(self.opt.weight_decay)
        return replace(self, steps=None, mu=constants.mu, smoothness=constants.smoothness), constants

    def work(self):
        return {"train": amount(1, None), "full": amount(None, 1)}

    def constants(self, n):
        """Return (eta, theta1, theta2, gamma, beta, p, rho) for n clients."""
        if self.mu is None or self.smoothness is None:
            raise InvalidArgument("AL2SGD: give mu and smoothness of the clients' risks, or steps='theory' with a linear model")
        p = self.p or self.lam / (self.lam + self.smoothness)
        rho = self.rho or p * (1 - p)
        plain, expected = (self.smoothness + self.lam) / n, max(self.smoothness / (1 - p), self.lam / p) / n  # L_F and calL
        largest, mu = max(plain, expected), self.mu / n
        eta, theta2 = 1 / (4 * largest), expected / (2 * largest)
        theta1 = min(0.5, math.sqrt(eta * mu * max(0.5, theta2 / rho)))
        gamma = 1 / max(2 * mu, 4 * theta1 / eta)
        return eta, theta1, theta2, gamma, 1 - gamma * mu, p, rho

    def silent(self, rnd):
        *_, p, rho = self.constants(rnd.clients)
        return rnd.uniform("AL2SGD coin") >= p and rnd.uniform("AL2SGD refresh") >= rho

    def init_server(self, task):
        model = task.init()
        return {"y": model, "z": model, "w": model}, {}

    def init_client(self, task, shared, data):
        anchor = gradient(task.risk, shared["w"], data["full"], by_rows=True)
        return {"y": shared["y"], "z": shared["z"], "w": shared["w"], "gradient": anchor}

    def client_update(self, task, shared, personal, data, rnd):
        n = rnd.clients
        eta, theta1, theta2, gamma, beta, p, rho = self.constants(n)
        y, z, w = personal["y"], personal["z"], personal["w"]

        def combined(a, b, c):
            return tree.add(tree.add(tree.scale(a, theta1), b, theta2), c, 1 - theta1 - theta2)

        x, mean_x = combined(z, w, y), combined(shared["z"], shared["w"], shared["y"])
        offset = tree.sub(w, shared["w"])
        g = tree.scale(tree.add(personal["gradient"], offset, self.lam), 1 / n)
        if rnd.uniform("AL2SGD coin") < p:
            g = tree.add(g, tree.sub(tree.sub(x, mean_x), offset), self.lam / (n * p))
        else:
            change = tree.sub(gradient(task.risk, x, data), gradient(task.risk, w, data))
            g = tree.add(g, change, 1 / (n * (1 - p)))
        new_y = tree.add(x, g, -eta)
        new_z = tree.add(tree.add(tree.scale(z, beta), x, 1 - beta), tree.sub(new_y, x), gamma / eta)
        anchor = personal["gradient"]
        if rnd.uniform("AL2SGD refresh") < rho:
            w, anchor = y, gradient(task.risk, y, data["full"], by_rows=True)
        return {"y": new_y, "z": new_z, "w": w}, {"y": new_y, "z": new_z, "w": w, "gradient": anchor}

    def server_update(self, task, shared, server, upload, rnd):
        return upload, server

    def predict(self, task, shared, personal, x):
        return task.apply(personal["y"], x)
