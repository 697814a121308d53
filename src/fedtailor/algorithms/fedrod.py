"""Fed-RoD: a generic classifier trained as if all classes were equally frequent, and a personal head on top of it.

What it does
    The generic model (features theta and head psi) descends on the balanced softmax loss, in which class c's logit is raised by
    log n_c, n_c being the client's number of training rows of that class; it is averaged as in FedAvg. On the same batches the
    client's own linear head phi_i descends on the cross-entropy of generic + personal logits, with features and generic logits
    held fixed. A client predicts with the sum of both heads, the shared model is the generic one.
Reference
    Chen & Chao 2022 (On bridging generic and personalized federated learning for image classification), Section 4.
    Balanced risk by the balanced softmax of Ren et al. 2020, and the two predictors of Fed-RoD (linear).
Differs from the paper
    The personal head starts at zero, so that a newcomer predicts with the generic model; it is a linear layer, not made by a
    hypernetwork. Both heads step on every batch from the same point, as in the authors' code. A class that a client does not have
    is out of its softmax (log 0). ``head_rate`` multiplies the step size of the personal head.
Limits
    Without the balanced loss the generic model is FedAvg's; with head_rate = 0 as well, so is everyone's prediction.
When to use
    When clients have different classes and both a good shared model and good personal ones are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.algorithms.prototypes import label_counts
from fedtailor.local import descend
from fedtailor.task.head import features, head_weight, needs_head, training_pass

ABSENT = -1e4  # the log of no rows: its exponential is 0 in floating point, and a padded row's loss stays finite


@dataclass(frozen=True, kw_only=True)
class FedROD(Algorithm):
    balanced: bool = True
    head_rate: float = param(1.0, ge=0)  # 0: the personal head stays at zero
    server_lr: float = param(1.0, gt=0)

    family = "part of the model personal"
    limits = (
        Limit({"balanced": False}, "FedAvg", compares="shared", exact=False),
        Limit({"balanced": False, "head_rate": 0.0}, "FedAvg", exact=False),
    )

    @property
    def leak(self):  # type: ignore[override]
        return "its loss is balanced by the client's numbers of rows per class" if self.balanced else None

    def work(self):
        return {**super().work(), **({"look": amount(None, 1)} if self.balanced else {})}  # to count labels once

    def init_server(self, task):
        needs_head(task, "FedROD", per_row=False)
        return {"model": task.init()}, {}

    def init_client(self, task, shared, data):
        start = torch.zeros_like(head_weight(task, shared["model"]))
        return {"weight": start, "bias": start[:, 0]}

    def prior(self, task, model, data):
        """Return log n_c for each class, what the balanced softmax adds to the logits; zero without it."""
        if not self.balanced:
            return 0.0
        counts = label_counts(task, model, data["look"])
        return torch.where(counts > 0, counts.clamp(min=1).log(), ABSENT)

    def client_update(self, task, shared, personal, data, rnd):
        prior = self.prior(task, shared["model"], data)

        def risk(both, batch):
            logits, moved, z = training_pass(task, both["model"], batch)
            generic = task.risk_of(logits + prior, batch, both["model"], moved)
            return generic + task.mean_loss(logits.detach() + F.linear(z.detach(), **both["head"]), batch)

        start = {"model": shared["model"], "head": personal}
        rates = {f"head/{name}": self.head_rate for name in personal}
        end = descend(risk, start, data, self.optimizer(rnd), rates=rates)
        return {"delta": tree.sub(end["model"], shared["model"])}, end["head"]

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.move(shared["model"], upload["delta"], self.server_lr)}, server

    def predict(self, task, shared, personal, x):
        own = F.linear(features(task, shared["model"], x), personal["weight"], personal["bias"])
        return task.apply(shared["model"], x) + own
