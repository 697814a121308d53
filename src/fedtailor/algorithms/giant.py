"""GIANT: clients turn the federation's gradient into Newton directions by their own Hessians; the server averages these.

What it does
    A round has two exchanges, each over all of a client's rows. First clients send the gradient at w; the server returns the
    weighted mean g. Then client i sends p_i, about H_i^-1 g with the Hessian H_i of its own objective, by ``cg_steps`` steps of
    conjugate gradients from zero; the server moves w by -lr times their mean p. With ``line_search`` a third exchange brings the
    objective at w - a p for a = 1, 1/4, 1/16, ..., and the first a is taken for which it is at most f(w) - 0.1 a <p, g> (the last
    if none is). The objective is risk + ridge/2 ||w||^2.
Reference
    Wang et al. 2018 (GIANT: Globally improved approximate Newton method), Algorithm 1.
    Local systems by conjugate gradients, and the backtracking list, as in Section 4.
Differs from the paper
    Means are weighed as the run asks, not plain; ``lr`` is a step size where there is no line search; ``damping`` is added to
    H_i in the system only (0 in the paper). A round may be of some clients. The model and what is known of the round go
    down in every exchange, as clients keep nothing; the paper sends each once.
Limits
    On least squares where all Hessians are equal (as with one client), enough steps of conjugate gradients reach the minimiser in
    one round, with lr = 1.
When to use
    For linear models and small smooth networks with few, large clients: few rounds. Without a ridge or damping, a client with few
    rows has a singular Hessian, and the directions explode. Steps of conjugate gradients that nearly solve a client's system
    magnify rounding: with many fewer or more of them, engines agree to more digits. Batch norm's statistics stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, amount, param
from fedtailor.errors import InvalidArgument
from fedtailor.local import SGD, Schedule, gradient, scan
from fedtailor.local.curvature import conjugate_gradient, hvp
from fedtailor.local.meter import metered

STEPS = tuple(4.0**-j for j in range(10))
ENOUGH = 0.1  # of the decrease that the slope promises


@dataclass(frozen=True, kw_only=True)
class GIANT(Algorithm):
    lr: float | Schedule = param(1.0, gt=0)
    cg_steps: int = param(10, ge=1)
    ridge: float = param(0.01, ge=0)  # 0 where every client's rows determine all parameters
    damping: float = param(0.0, ge=0)
    line_search: bool = False

    family = "one model for all"
    leak = "it sends gradients and Newton directions of training rows"

    @property
    def exchanges(self):  # type: ignore[override]
        return 3 if self.line_search else 2

    def __post_init__(self):
        super().__post_init__()
        if self.steps or self.epochs or self.radius or (self.opt.privacy is None and self.opt != SGD()):
            raise InvalidArgument(
                "GIANT takes no local steps; leave out steps, epochs, opt and radius, and set cg_steps and ridge"
            )

    @classmethod
    def example(cls):
        return cls(cg_steps=5)  # near the end of the Krylov space conjugate gradients magnify rounding

    def work(self):
        return {"train": amount(None, 1)}  # all rows

    def init_server(self, task):
        model = task.init()
        searched = {"direction": tree.zeros(model)} if self.line_search else {}
        return {"model": model, "gradient": tree.zeros(model), **searched}, {}

    def client_update(self, task, shared, personal, data, rnd):
        w = shared["model"]
        if rnd.exchange == 0:
            return {"gradient": add_trainable(gradient(task.risk, w, data, by_rows=True), w, self.ridge)}, personal
        with metered(None):  # to look at the objective, or to multiply by its Hessian, trains no parameters
            if rnd.exchange == 2:
                return {"values": self.values(task, shared, data)}, personal
            more = self.ridge + self.damping
            solved = conjugate_gradient(
                lambda v: add_trainable(hvp(task.risk, w, data, v), v, more), shared["gradient"], self.cg_steps
            )
            return {"direction": solved}, personal

    def values(self, task, shared, data):
        """Return the objective at w and at w - a p for every a of the list."""
        points = [add_trainable(shared["model"], shared["direction"], -a) for a in (0.0, *STEPS)]

        def add(total, batch):
            weight = task.weigh(batch)
            rows = torch.tensor(float(len(batch["y"]))) if weight is None else weight.sum()
            risks = torch.stack([task.risk(point, batch) for point in points])
            return {"sum": total["sum"] + risks * rows.to(risks), "rows": total["rows"] + rows.to(risks)}

        like = next(iter(shared["model"].values()))
        start = {"sum": like.new_zeros(len(points)), "rows": like.new_zeros(())}
        total = scan(add, start, data)
        sizes = torch.stack([tree.dot(tree.trainable(point), tree.trainable(point)) for point in points])
        return total["sum"] / total["rows"] + self.ridge / 2 * sizes

    def server_update(self, task, shared, server, upload, rnd):
        shared = {**shared, **tree.pick(upload, shared)}
        if rnd.exchange == 0 or (rnd.exchange == 1 and self.line_search):
            return shared, server
        if self.line_search:
            p, step = shared["direction"], longest(upload["values"], tree.dot(shared["direction"], shared["gradient"]))
        else:
            lr = self.optimizer(rnd).lr
            p, step = upload["direction"], lr(0) if callable(lr) else lr
        return {**shared, "model": add_trainable(shared["model"], p, -step)}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)


def add_trainable(a, b, factor):
    """Return a + factor b over the parameters; buffers as in a."""
    return {name: leaf if tree.is_buffer(name) else leaf + factor * b[name] for name, leaf in a.items()}


def longest(values, slope):
    """Return the first step of the list whose value is low enough, or the last."""
    steps = torch.tensor(STEPS).to(values)
    good = values[1:] <= values[0] - ENOUGH * steps * slope
    return steps[torch.where(good.any(), good.to(torch.int64).argmax(), len(STEPS) - 1)]
