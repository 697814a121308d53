"""HypCluster (IFCA): k shared models, each client learns with the one that fits it best.

What it does
    A client receives all k models, picks the one with the lowest risk on its own training data before training, trains it and
    sends the change; the server averages within each cluster. An empty cluster keeps its model.
Reference
    Mansour et al. 2020 (HypCluster); Ghosh et al. 2020 (IFCA).
Differs from the paper
    The papers leave the k starts open, and from random ones groups often end in one cluster. Here everyone trains the same
    model in the first round; the server picks k of the changes, one after the other, such that the weighted sum of squared
    distances to the nearest one picked is smallest, and each cluster starts with the mean of the changes nearest to its own
    (BUILD of Kaufman & Rousseeuw 1990). For that it sees the first round's uploads one by one. With ``spread`` > 0 it sees
    means only, and the starts are the model's start plus Gaussian noise of that size (the first is the start itself).
Limits
    k = 1 is FedAvg.
When to use
    When clients form a few groups. The download is k models. The first round should have clients of every group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.func import vmap

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.local import descend, scan
from fedtailor.server.reduce import Stack, named

TIE = 1e-5  # costs that differ by less are the same, whatever the engine's rounding: the client of the lowest rank is picked


class Changes(Stack):
    """The change of each client where all have trained the first of the k models, side by side."""

    def add(self, state, uploads, weights, places):
        return super().add(state, tree.map(lambda leaf: leaf[:, 0], uploads["delta"]), weights, places)


@dataclass(frozen=True, kw_only=True)
class HypCluster(Algorithm):
    k: int = param(2, ge=1)
    spread: float = param(0.0, ge=0)

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

    def splits(self, rnd):
        """True for the round after which the k models part."""
        return self.k > 1 and self.spread == 0 and rnd.number == 0

    def reducer(self, task, shared, rnd):
        return Changes() if self.splits(rnd) else named("mean")

    def choose(self, task, models, data):
        """Return the cluster whose model has the lowest risk on the client's batches, one-hot."""

        def add(total, batch):
            weight = task.weigh(batch)
            rows = torch.tensor(float(len(batch["y"]))) if weight is None else weight.sum()
            losses = torch.stack([risk_of(task, member(models, j), batch) for j in range(self.k)])
            return {"loss": total["loss"] + losses * rows.to(losses)}

        like = next(iter(models.values()))
        total = scan(add, {"loss": torch.zeros(self.k, dtype=like.dtype, device=like.device)}, data)["loss"]
        return (torch.arange(self.k, device=like.device) == total.argmin()).to(like.dtype)

    def client_update(self, task, shared, personal, data, rnd):
        choice = self.choose(task, shared["models"], data["look"])
        start = tree.map(lambda leaf: torch.tensordot(choice, leaf, 1), shared["models"])
        delta = tree.sub(descend(task.risk, start, data, self.optimizer(rnd)), start)
        by_cluster = tree.map(lambda leaf: choice.view(-1, *[1] * leaf.dim()) * leaf, delta)
        return {"delta": by_cluster, "chosen": choice}, personal

    def server_update(self, task, shared, server, upload, rnd):
        if self.splits(rnd):
            share = groups(upload, rnd, self.k)
            step = tree.map(lambda leaf: torch.tensordot(share.to(leaf), leaf, 1), upload)
            return {"models": tree.add(shared["models"], step)}, server
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


def groups(changes, rnd, k):
    """Return whose changes make up each of k means, and with what weight: [k, clients], rows that sum to one."""
    flat = torch.cat([leaf.flatten(1) for leaf in tree.leaves(tree.trainable(changes))], 1).cpu().double()
    apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()
    weights, ranks = rnd.weights.cpu().double(), rnd.ranks.cpu()
    near, picked = torch.full_like(weights, torch.inf), []
    for _ in range(k):
        cost = weights @ torch.minimum(near.unsqueeze(1), apart)
        first = torch.where(cost <= cost.min() * (1 + TIE), ranks, ranks.max() + 1).argmin()
        picked.append(first)
        near = torch.minimum(near, apart[first])
    picks = torch.stack(picked)
    share = torch.nn.functional.one_hot(apart[:, picks].argmin(1), k).T * weights
    own = torch.nn.functional.one_hot(picks, len(flat)).double()  # two picks are alike where there are fewer than k changes
    share = torch.where(share.sum(1, keepdim=True) > 0, share, own)
    return share / share.sum(1, keepdim=True)


def member(models, j):
    """Return the j-th of the stacked models."""
    return tree.map(lambda leaf: leaf[j], models)


def risk_of(task, model, batch):
    """Return the risk in evaluation mode: no dropout, running statistics."""
    return task.mean_loss(task.apply(model, batch["x"]), batch)
