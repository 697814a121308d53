"""FedProto: clients keep their models and share what each class looks like, the mean of its features.

What it does
    A client descends on risk + lam ||f(x) - C_y||^2, averaged over the rows of a batch, where f(x) is what enters its head and
    C_y the global prototype of the row's class; a class without a prototype adds nothing. After training it sends the sums of its
    features and its numbers of rows per class; the server divides the totals: C_c is the mean of the clients' prototypes of class
    c, weighed by their rows of it. A client predicts with its own model.
Reference
    Tan et al. 2022 (FedProto), Algorithm 1; prototypes by equation (3), their mean (6), local objective (7).
Differs from the paper
    The distance is squared and taken from each row's features, as in the authors' code, not from a batch's mean per class. There
    it is a mean over the d features, so that our lam is their lam / d. Equation (6) divides once more by the number of clients,
    which would shrink every prototype; we do not. Prototypes are of all training rows, in evaluation mode, after the round's
    training. Features in training have dropout where the model has. A class that nobody of the cohort has keeps its prototype.
    All clients have the same architecture. The first round has no prototypes.
Limits
    lam = 0 is Local.
When to use
    When models must not travel, or heads and label sets differ: an upload is classes x features numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.algorithms.prototypes import empty, feature_sums, means
from fedtailor.local import descend
from fedtailor.task.head import needs_head, training_pass


@dataclass(frozen=True, kw_only=True)
class FedProto(Algorithm):
    lam: float = param(1.0, ge=0)

    family = "a personal model tied to the shared one"
    reduce = "even"  # uploads bring their own weights: rows of each class
    limits = (Limit({"lam": 0.0}, "Local"),)
    leak = "it sends means of the features of training rows"

    def work(self):
        return {**super().work(), "look": amount(None, 1)}  # every training row once, for the prototypes

    def init_server(self, task):
        needs_head(task, "FedProto")
        start = empty(task, task.init())
        return {"prototypes": start["sums"], "known": start["counts"]}, {}

    def init_client(self, task, shared, data):
        return {"model": task.init()}

    def client_update(self, task, shared, personal, data, rnd):
        model = descend(drawn(task, shared, self.lam), personal["model"], data, self.optimizer(rnd))
        return feature_sums(task, model, data["look"]), {"model": model}

    def server_update(self, task, shared, server, upload, rnd):
        seen = upload["counts"] > 0
        prototypes = torch.where(seen.unsqueeze(-1), means(upload), shared["prototypes"])
        return {"prototypes": prototypes, "known": torch.maximum(shared["known"], seen.to(prototypes))}, server

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)


def drawn(task, shared, lam):
    """Return the risk plus lam times the rows' mean squared distance from features to the prototype of their class, where
    known."""
    if lam == 0:
        return task.risk

    def risk(model, batch):
        logits, moved, z = training_pass(task, model, batch)
        apart = (z - shared["prototypes"][batch["y"]]).square().sum(-1) * shared["known"][batch["y"]]
        return task.risk_of(logits, batch, model, moved) + lam * task.mean_over(apart, batch)

    return risk
