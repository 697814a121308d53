"""Scaffold: control variates against client drift.

What it does
    Local steps use gradient - c_i + c; after K steps c_i <- c_i - c + (w - y)/(K lr) (Option II), the server moves w by
    ``server_lr`` times the mean change and c by |S|/N times the mean change of the c_i.
Reference
    Karimireddy et al. 2020 (SCAFFOLD), Algorithm 1, Option II.
Differs from the paper
    Nothing known. K is the true number of a client's steps. Only plain SGD with a constant step makes the formula for c_i right;
    momentum, weight decay, Adam and schedules are refused.
Limits
    ScaffoldP with no personal part and first = "zeros".
When to use
    One model for all, very different clients, several local steps: it reaches the pooled optimum where FedAvg does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, param
from fedtailor.errors import InvalidArgument
from fedtailor.local import SGD, Schedule, count_steps, descend, linear


def plain_sgd(method):
    """Refuse what would make (u - u_K)/(K lr) anything but a mean of gradients."""
    opt = method.opt.plain
    if type(opt) is not SGD or opt.momentum or opt.weight_decay or isinstance(method.lr, Schedule):
        name = type(method).__name__
        raise InvalidArgument(f"{name}: control variates need plain SGD with a constant lr; use opt=ft.SGD() and a number for lr")
    if method.radius is not None:
        raise InvalidArgument(f"{type(method).__name__}: control variates do not allow a projection; leave out radius")


def updated_control(start, end, c, ci, data, lr):
    """Return the new c_i, c_i - c + (start - end)/(K lr), of the parameters that have a control variate."""
    steps = count_steps(data)
    drift = tree.map(lambda a, b: (a - b) / steps / lr, tree.pick(start, c), tree.pick(end, c))
    return tree.add(tree.sub(ci, c), drift)


@dataclass(frozen=True, kw_only=True)
class Scaffold(Algorithm):
    server_lr: float = param(1.0, gt=0)

    family = "one model for all"

    def __post_init__(self):
        super().__post_init__()
        plain_sgd(self)

    def init_server(self, task):
        model = task.init()
        return {"model": model, "control": tree.zeros(tree.trainable(model))}, {}

    def init_client(self, task, shared, data):
        return {"control": tree.zeros(shared["control"])}

    def client_update(self, task, shared, personal, data, rnd):
        w, c, ci = shared["model"], shared["control"], personal["control"]
        y = descend(task.risk, w, data, self.optimizer(rnd), linear(tree.sub(c, ci)))
        new = updated_control(w, y, c, ci, data, self.lr)
        return {"delta": tree.sub(y, w), "control": tree.sub(new, ci)}, {"control": new}

    def server_update(self, task, shared, server, upload, rnd):
        model = tree.move(shared["model"], upload["delta"], self.server_lr)
        return {"model": model, "control": tree.add(shared["control"], upload["control"], rnd.turnout)}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)
