"""FedPAC: shared features drawn to global class means, and for each client the best mixture of all clients' heads.

What it does
    A client receives the shared body, the global mean features of each class and its own head. It trains the head with the body
    fixed, then the body with the head fixed on risk + lam ||f(x) - c_y||^2 / d (d features, mean over the rows). It sends both,
    its class means after training, and statistics of its features before it. The server averages bodies and class means, and
    mixes for each client i of the cohort the cohort's heads with the weights on the simplex that minimise a' P_i a, where
    P_i = diag(v) + D D', row j of D being h_i - h_j: h_j holds p_j(y) E[f | y] of each class, v_j the variance of its estimate.
Reference
    Xu, Tong & Huang 2023 (Personalized federated learning with feature alignment and classifier collaboration), Algorithm 1.
    Alignment term of Section 3.2, estimated v and h and the quadratic program of Section 3.3.
Differs from the paper
    v and h are estimated with the body as received, in evaluation mode, as in the authors' code. The first round has no class
    means and no alignment, nor has a class that nobody has shown yet (the authors' code takes the client's own mean before
    training); a class that nobody of the cohort has keeps its mean. Weights below 1e-3 stay (the authors' code drops them). Heads
    of clients outside the cohort stay as they are. The heads are the server's, so a client keeps nothing.
Limits
    lam = 0 without mixing (``combine=False``) is FedRep with the same work.
When to use
    When clients differ in which classes they have, and some are alike. The server sees every upload.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.algorithms.fedproto import drawn
from fedtailor.algorithms.partial import whole
from fedtailor.algorithms.prototypes import empty, feature_sums, means
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend, scan
from fedtailor.server.mixture import best_mixture
from fedtailor.task.head import features, needs_head

ALONE = {"lam": 0.0, "combine": False, "personal_steps": 3, "personal_epochs": None}


@dataclass(frozen=True, kw_only=True)
class FedPAC(Algorithm):
    lam: float = param(1.0, ge=0)
    combine: bool = True
    personal_lr: float | None = param(None, gt=0)  # of the head; lr if not given
    personal_steps: int | None = param(None, ge=1)
    personal_epochs: int | None = param(None, ge=1)  # one if neither is given

    family = "a model made for each client"
    reduce = "stack"
    limits = (Limit(ALONE, "FedRep", exact=False),)
    leak = "it sends means and variances of the features of training rows"

    def work(self):
        look = amount(None, 1)  # every training row once, for the statistics
        return {**super().work(), "personal": amount(self.personal_steps, self.personal_epochs), "look": look}

    def init_server(self, task):
        needs_head(task, "FedPAC")
        model, head = task.init(), task.groups["head"]
        if not tree.drop(model, head):
            raise InvalidArgument("FedPAC: the head leaves no shared parameters; use a model with layers before it")
        if not task.clients:
            raise InvalidArgument("FedPAC keeps a head of every client, and their number is not known; use ft.run")
        start = empty(task, model)
        heads = tree.map(lambda leaf: leaf.expand(task.clients, *leaf.shape).clone(), tree.pick(model, head))
        shared = {"model": tree.drop(model, head), "prototypes": start["sums"], "known": start["counts"]}
        return shared, {"heads": heads, "start": tree.pick(model, head)}

    def downlink(self, task, shared, server, clients, rnd):
        if clients is None:
            return {"head": server["start"]}
        return {"head": tree.map(lambda leaf: leaf[clients], server["heads"])}

    def client_update(self, task, shared, personal, data, rnd):
        u, v = shared["model"], shared["head"]
        hold_u, hold_v = dict.fromkeys(u, 0.0), dict.fromkeys(v, 0.0)
        before = self.statistics(task, whole(task, u, v), data["look"])
        start = descend(task.risk, whole(task, u, v), data["personal"], self.optimizer(rnd, self.personal_lr), rates=hold_u)
        risk = drawn(task, shared, self.lam / shared["prototypes"].shape[-1])
        end = descend(risk, whole(task, u, tree.pick(start, v)), data, self.optimizer(rnd), rates=hold_v)
        after = feature_sums(task, end, data["look"])
        return {"delta": tree.sub(tree.pick(end, u), u), "head": tree.pick(start, v), **before, "classes": after}, personal

    def statistics(self, task, model, data):
        """``h`` [classes, features]: p(y) E[f | y]; ``v``: the variance of its estimate, summed over all entries."""

        def add(total, batch):
            squares = features(task, model, batch["x"]).square().sum(-1)
            mask = batch.get("mask")
            return {"squares": total["squares"] + (squares if mask is None else squares * mask).sum()}

        sums = feature_sums(task, model, data)
        rows = sums["counts"].sum()
        squares = scan(add, {"squares": torch.zeros_like(rows)}, data)["squares"]
        h = sums["sums"] / rows
        return {"h": h, "v": (squares / rows - h.square().sum()) / rows}

    def server_update(self, task, shared, server, upload, rnd):
        step = tree.map(lambda leaf: torch.tensordot(rnd.weights.to(leaf), leaf, 1), upload["delta"])
        total = tree.map(lambda leaf: leaf.sum(0), upload["classes"])
        seen = total["counts"] > 0
        prototypes = torch.where(seen.unsqueeze(-1), means(total), shared["prototypes"])
        shared = {
            "model": tree.add(shared["model"], step),
            "prototypes": prototypes,
            "known": torch.maximum(shared["known"], seen.to(prototypes)),
        }
        mixed = upload["head"]
        if self.combine:
            a = torch.from_numpy(mixtures(upload["v"].cpu().double().numpy(), upload["h"].cpu().double().flatten(1).numpy()))
            mixed = tree.map(lambda leaf: torch.tensordot(a.to(leaf), leaf, 1), mixed)
        heads = tree.map(lambda old, new: old.index_copy(0, rnd.ranks, new), server["heads"], mixed)
        return shared, {**server, "heads": heads}

    def predict(self, task, shared, personal, x):
        return task.apply(whole(task, shared["model"], shared["head"]), x)


def mixtures(v, h):
    """Row i: how much of each client's head goes into client i's."""
    apart = [h[i] - h for i in range(len(h))]
    return np.stack([best_mixture(np.diag(v) + d @ d.T) for d in apart])
