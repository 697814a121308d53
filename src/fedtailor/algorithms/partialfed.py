"""PartialFed-Adaptive: every client learns, layer by layer, whether to start a round from the shared or from its own weights.

What it does
    A layer is a module with its parameters and statistics. A client keeps its weights v and two logits a per layer (shared, own).
    With Gumbel noise e it draws the one-hot h = argmax(a + e) of every layer, and trains the whole model from h_0 g + h_1 v; the
    result is its new v, whose change from g it sends; the server averages. Then the logits descend on the risk of the mixture
    h_0 g + h_1 v of the received g and the new v, with new noise in every step and straight through: forward h, backward
    s = softmax((a + e)/tau). So a_0 moves by -``logit_lr`` s_0 s_1/tau <gradient in the layer, g - v>, and a_1 by as much the
    other way. tau is ``temperature`` * ``cooling``^round, but not below ``coldest``. A client predicts with the mixture of the
    last g and v that has the larger logit in every layer; nothing is drawn.
    With ``personal`` the choice is fixed and nothing is drawn: these parts start from the own weights, the others from g.
Reference
    Sun et al. 2021 (PartialFed), PartialFed-Adaptive, and PartialFed-Fix with ``personal``; from memory.
Differs from the paper
    The mixture whose risk the logits descend on is derived: it is what the next round would start from, with the g at hand in
    place of the one not yet received. A round has one phase on the weights and one on the logits; the logits start at zero and
    take plain SGD steps. Partial turnout is allowed (the paper has all clients in every round): who is not sampled keeps v and a.
Limits
    personal = () is FedAvg, all parts personal is Local, one part personal is FedSim on it.
When to use
    When it is not known which layers are worth sharing, or when this differs from client to client. The logits learn on training
    rows, on which the own weights look best: keep ``logit_lr`` small where clients have few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, names_of, param
from fedtailor.algorithms.partial import whole
from fedtailor.errors import InvalidArgument
from fedtailor.local import SGD, descend
from fedtailor.task.device import in_double
from fedtailor.task.layers import uniform

STREAM = 2**32  # number of the random stream of a step: beyond those of the dropouts, which count from 0


@dataclass(frozen=True, kw_only=True)
class PartialFed(Algorithm):
    logit_lr: float = param(0.1, gt=0)
    logit_steps: int | None = param(None, ge=1)  # as much as for the weights if neither is given
    logit_epochs: int | None = param(None, ge=1)
    temperature: float = param(5.0, gt=0)
    cooling: float = param(0.95, gt=0, le=1)
    coldest: float = param(0.5, gt=0)
    personal: str | Sequence[str] | None = None  # parts that always start from the own weights; None: the logits decide

    family = "layers chosen by each client"
    limits = (
        Limit({"personal": ()}, "FedAvg"),
        Limit({"personal": ("head", "body")}, "Local"),
        Limit({"personal": "head"}, "FedSim"),
    )

    def __post_init__(self):
        super().__post_init__()
        if self.coldest > self.temperature:
            raise InvalidArgument(f"PartialFed: coldest = {self.coldest:g} is above temperature = {self.temperature:g}; lower it")

    def work(self):
        train = super().work()["train"]
        nothing = amount(0, None)  # what a client predicts with is put together, not trained
        if self.personal is not None:
            return {"train": train, "personalize": nothing}
        logits = amount(self.logit_steps, self.logit_epochs, default=train)
        return {"train": train, "logits": logits, "personalize": nothing}

    def init_server(self, task):
        return {"model": task.init()}, {}

    def init_client(self, task, shared, data):
        model = shared["model"]
        if self.personal is not None:
            return {"model": model}
        like = next(iter(model.values()))
        return {"model": model, "logits": torch.zeros(len(layers(task)), 2, dtype=like.dtype, device=like.device)}

    def client_update(self, task, shared, personal, data, rnd):
        g, v = shared["model"], personal["model"]
        if self.personal is not None:
            w = descend(task.risk, self.fixed(task, g, v), data, self.optimizer(rnd))
            return {"delta": tree.sub(w, g)}, {"model": w}
        a, tau = personal["logits"], max(self.coldest, self.temperature * self.cooling**rnd.number)
        start = mixture(task, g, v, one_hot(a + gumbel(data["key"][0], a)))
        w = descend(task.risk, start, data, self.optimizer(rnd))

        def risk(params, batch):
            return task.risk(mixture(task, g, w, straight_through(params["logits"], batch["key"], tau)), batch)

        a = descend(risk, {"logits": a}, data["logits"], self.privately(SGD(lr=self.logit_lr)))["logits"]
        return {"delta": tree.sub(w, g)}, {"model": w, "logits": a}

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.add(shared["model"], upload["delta"])}, server

    def personalize(self, task, shared, personal, data):
        g, v = shared["model"], personal["model"]
        chosen = self.fixed(task, g, v) if self.personal is not None else mixture(task, g, v, one_hot(personal["logits"]))
        return {**personal, "model": chosen}

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)

    def fixed(self, task, g, v):
        return whole(task, g, tree.pick(v, names_of(task, self.personal or ())))


def layers(task):
    """Return the modules that own parameters or statistics, in the order of the model."""
    return tuple(dict.fromkeys(owner(name) for name in task.names))


def owner(name):
    """Path of the module that a parameter or buffer belongs to."""
    return name.removeprefix(tree.BUFFER).rpartition(".")[0]


def gumbel(key, like):
    """Standard Gumbel noise [layers, 2] from a step's key; the uniform numbers are moved to the middle of their cells, off 0."""
    u = in_double(uniform(key, STREAM, like.shape)) + 2**-25
    return -(-u.log()).log().to(like)


def one_hot(scores):
    """Return scores as one-hot along the last axis: a one at the larger score, at the first on a tie."""
    first = scores[..., 0] >= scores[..., 1]
    return torch.stack([first, ~first], -1).to(scores)


def straight_through(logits, key, tau):
    """Return a one-hot sample [layers, 2] whose gradient is that of the softmax."""
    noisy = logits + gumbel(key, logits)
    soft = torch.softmax(noisy / tau, -1)
    return one_hot(noisy.detach()) + (soft - soft.detach())


def mixture(task, g, v, choice):
    """Return choice_0 g + choice_1 v, layer by layer. Statistics follow the choice but do not influence it."""
    index_of = {layer: i for i, layer in enumerate(layers(task))}

    def mixed(name):
        share = choice[index_of[owner(name)]]
        share = share.detach() if tree.is_buffer(name) else share
        return share[0] * g[name] + share[1] * v[name]

    return {name: mixed(name) for name in task.names}
