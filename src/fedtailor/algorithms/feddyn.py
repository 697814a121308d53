"""FedDyn: clients' losses are bent so that their optima meet.

What it does
    A client descends on risk - <g_i, y> + alpha/2 ||y - w||^2 from w and sets g_i <- g_i - alpha (y - w). The server keeps
    h <- h - alpha |S|/m mean (y - w) and sets w <- mean y - h/alpha.
Reference
    Acar et al. 2021 (FedDyn), Algorithm 1.
Differs from the paper
    The local problem is solved by the given steps, not exactly. What is measured is w (the authors' code measures mean y); no
    hidden weight decay or clipping.
Limits
    At the fixed point every client's bent loss has its minimum at the pooled optimum.
When to use
    One model for all, very different clients, with little state on the wire (one model each way).
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, param
from fedtailor.local import descend, linear, prox


@dataclass(frozen=True, kw_only=True)
class FedDyn(Algorithm):
    alpha: float = param(0.1, gt=0)

    family = "one model for all"

    def init_server(self, task):
        model = task.init()
        return {"model": model}, {"h": tree.zeros(tree.trainable(model))}

    def init_client(self, task, shared, data):
        return {"slope": tree.zeros(tree.trainable(shared["model"]))}

    def client_update(self, task, shared, personal, data, rnd):
        w, slope = shared["model"], personal["slope"]
        penalty = prox(w, self.alpha) + linear(tree.scale(slope, -1.0))
        y = descend(task.risk, w, data, self.optimizer(rnd), penalty)
        delta = tree.sub(y, w)
        return {"delta": delta}, {"slope": tree.add(slope, tree.trainable(delta), -self.alpha)}

    def server_update(self, task, shared, server, upload, rnd):
        delta = upload["delta"]
        h = tree.add(server["h"], tree.trainable(delta), -self.alpha * rnd.turnout)
        mean = tree.add(shared["model"], delta)
        return {"model": {**mean, **tree.add(tree.trainable(mean), h, -1 / self.alpha)}}, {"h": h}

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)
