"""L2GD: loopless gradient descent on local models with a penalty on their spread.

What it does
    Minimises (1/n) sum f_i(x_i) + lam/(2n) sum ||x_i - mean||^2. Each round is one iteration: everybody flips the same coin. With
    probability 1 - p all take a gradient step of size lr/(1 - p); with probability p all move towards the mean by
    t = lr lam / p. Nothing travels but when the coin turns from steps to averaging.
Reference
    Hanzely and Richtarik 2020 (L2GD), Algorithm 1; our lr is their alpha/n.
Differs from the paper
    Re-derived from the objective: the expected direction of an iteration is its gradient. Bytes are counted in the rounds where
    the coin turns, since repeated averaging leaves the mean as it is.
Limits
    Its fixed points, with a step that falls, are those of Problem 2 (CLUP) with uniform weights. With a constant step and clients
    whose minimisers differ it hovers about them.
When to use
    For its theory; FedCLUP reaches the same minimiser with a constant step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, amount, param
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend


def one_step(method):
    """Refuse local work other than one step per round."""
    if method.steps not in (None, 1, "theory") or method.epochs is not None:
        raise InvalidArgument(f"{type(method).__name__}: a round is one iteration; leave out steps and epochs")


@dataclass(frozen=True, kw_only=True)
class L2GD(Algorithm):
    lam: float = param(0.5, ge=0)
    p: float = param(0.2, gt=0, lt=1)  # lam/(lam + L) communicates least

    family = "a personal model tied to the shared one"
    needs_everyone = True

    def __post_init__(self):
        super().__post_init__()
        one_step(self)
        if isinstance(self.lr, (int, float)) and self.lr * self.lam > self.p:
            share = self.lr * self.lam / self.p
            raise InvalidArgument(f"L2GD: lr * lam / p = {share:g} exceeds 1; use a smaller lr or a larger p")

    def work(self):
        return {"train": amount(1, None)}

    def averages(self, rnd, number):
        return rnd.uniform("L2GD", number) < self.p

    def silent(self, rnd):
        before = rnd.number > 0 and self.averages(rnd, rnd.number - 1)
        return before or not self.averages(rnd, rnd.number)

    def looks(self, rnd):
        return not self.averages(rnd, rnd.number)

    def init_server(self, task):
        return {"model": task.init()}, {}

    def init_client(self, task, shared, data):
        return {"model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        x, opt = personal["model"], self.optimizer(rnd)
        lr = opt.lr(0) if callable(opt.lr) else opt.lr
        if self.averages(rnd, rnd.number):
            new = tree.move(x, tree.sub(shared["model"], x), lr * self.lam / self.p)
        else:
            new = descend(task.risk, x, data, replace(opt, lr=lr / (1 - self.p)))
        return {"model": new}, {"model": new}

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": upload["model"]}, server

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)
