"""HypCluster (IFCA): k shared models, each client learns with the one that fits it best.

What it does
    A client receives all k models, picks the one with the lowest risk on its own training data before training, trains it and
    sends the change; the server averages within each cluster. An empty cluster keeps its model.
Reference
    Mansour et al. 2020 (HypCluster); Ghosh et al. 2020 (IFCA).
Differs from the paper
    The k starts are the model's start plus Gaussian noise of size ``spread`` (the first is the start itself): they must differ,
    or the clusters collapse.
Limits
    k = 1 is FedAvg.
When to use
    When clients form a few groups. The download is k models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.func import vmap

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.local import descend, scan


@dataclass(frozen=True, kw_only=True)
class HypCluster(Algorithm):
    k: int = param(2, ge=1)
    spread: float = param(0.1, gt=0)

    family = "clusters"
    limits = (Limit({"k": 1}, "FedAvg", exact=False),)
    leak = "a client chooses its cluster by the loss on its training rows"

    def work(self):
        look = amount(None, 1)  # one pass over all training rows, to choose by
        return {**super().work(), "look": look, "personalize": look}

    def init_server(self, task):
        draw = torch.Generator().manual_seed(0)

        def starts(leaf, trained):
            noise = torch.randn((self.k, *leaf.shape), generator=draw, dtype=leaf.dtype)
            noise[0] = 0
            return leaf + self.spread * noise if trained else leaf.expand(self.k, *leaf.shape).clone()

        return {"models": {name: starts(leaf, not tree.is_buffer(name)) for name, leaf in task.init().items()}}, {}

    def choose(self, task, models, data):
        """The cluster whose model has the lowest risk on the client's batches, one-hot."""

        def add(total, batch):
            weight = task.weigh(batch)
            rows = torch.tensor(float(len(batch["y"]))) if weight is None else weight.sum()
            losses = torch.stack([risk_of(task, member(models, j), batch) for j in range(self.k)])
            return {"loss": total["loss"] + losses * rows.to(losses)}

        like = next(iter(models.values()))
        total = scan(add, {"loss": torch.zeros(self.k, dtype=like.dtype)}, data)["loss"]
        return (torch.arange(self.k) == total.argmin()).to(like.dtype)

    def client_update(self, task, shared, personal, data, rnd):
        choice = self.choose(task, shared["models"], data["look"])
        start = tree.map(lambda leaf: torch.tensordot(choice, leaf, 1), shared["models"])
        delta = tree.sub(descend(task.risk, start, data, self.optimizer(rnd)), start)
        by_cluster = tree.map(lambda leaf: choice.view(-1, *[1] * leaf.dim()) * leaf, delta)
        return {"delta": by_cluster, "chosen": choice}, personal

    def server_update(self, task, shared, server, upload, rnd):
        mass = upload["chosen"]
        share = torch.where(mass > 0, 1 / mass.clamp(min=1e-30), torch.zeros_like(mass))
        step = tree.map(lambda leaf: leaf * share.view(-1, *[1] * (leaf.dim() - 1)), upload["delta"])
        return {"models": tree.add(shared["models"], step)}, server

    def personalize(self, task, shared, personal, data):
        return {"chosen": self.choose(task, shared["models"], data)}

    def predict(self, task, shared, personal, x):
        if "chosen" not in personal:  # a newcomer before it has looked: the mean of the k predictions
            return vmap(lambda model: task.apply(model, x))(shared["models"]).mean(0)
        return task.apply(tree.map(lambda leaf: torch.tensordot(personal["chosen"], leaf, 1), shared["models"]), x)


def member(models, j):
    """The j-th of the stacked models."""
    return tree.map(lambda leaf: leaf[j], models)


def risk_of(task, model, batch):
    """The risk in evaluation mode: no dropout, running statistics."""
    return task.mean_loss(task.apply(model, batch["x"]), batch)
