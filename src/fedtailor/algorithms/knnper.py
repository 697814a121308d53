"""kNN-Per: the shared model's prediction mixed with a vote of the client's own nearest neighbours.

What it does
    The model is trained by FedAvg. Before predicting, a client stores the features (input of the head) and true labels of its
    training rows. p = weight p_knn + (1 - weight) softmax(logits), where p_knn weighs the ``k`` nearest stored rows by
    exp(-squared distance / (D scale)), D being the number of features.
Reference
    Marfoq et al. 2022 (kNN-Per).
Differs from the paper
    The mixing weight, unless given, is chosen on the client's validation rows from a grid of 11 (the authors' script scores test
    rows). Where a client has fewer than k rows, all vote.
Limits
    weight = 0 gives FedAvg's probabilities.
When to use
    For classification with good shared features and no wish to train at the clients' end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, amount, param
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend


@dataclass(frozen=True, kw_only=True)
class KNNPer(Algorithm):
    k: int = param(7, ge=1)
    weight: float | None = param(None, ge=0, le=1)  # chosen on validation if not given (0.5 where there are no such rows)
    scale: float = param(1.0, gt=0)
    server_lr: float = param(1.0, gt=0)

    family = "the shared model, adapted"
    leak = "a client predicts from its stored training rows"

    def work(self):
        return {**super().work(), "personalize": amount(None, 1)}  # every training row once

    def init_server(self, task):
        if task.features is None or not task.kind.softmax:
            raise InvalidArgument("KNNPer needs a classifier with features (a model with a head); use another model or method")
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        model = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"delta": tree.sub(model, shared["model"])}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.move(shared["model"], upload["delta"], self.server_lr)}, server

    def personalize(self, task, shared, personal, data):
        x, y, mask = (data[name].flatten(0, 1) for name in ("x", "y", "mask"))
        if y.dim() > 1:
            raise InvalidArgument("KNNPer needs one label per row, not one per position; use another method")
        stored = {"keys": task.features(shared["model"], x), "values": y, "mask": mask}
        if self.weight is not None or "val" not in data:
            fixed = 0.5 if self.weight is None else self.weight
            return {**stored, "weight": torch.as_tensor(fixed, dtype=mask.dtype, device=mask.device)}
        val = data["val"]
        votes, probabilities = self.votes(task, shared, stored, val["x"]), task.apply(shared["model"], val["x"]).softmax(-1)
        grid = torch.linspace(0, 1, 11, dtype=mask.dtype, device=mask.device)
        right = torch.stack([(((w * votes + (1 - w) * probabilities).argmax(-1) == val["y"]) * val["mask"]).sum() for w in grid])
        return {**stored, "weight": grid[right.argmax()]}

    def votes(self, task, shared, stored, x):
        """Return p_knn of each row, [rows, classes]."""
        features = task.features(shared["model"], x)
        squared = torch.cdist(features, stored["keys"], compute_mode="donot_use_mm_for_euclid_dist") ** 2
        squared = torch.where(stored["mask"] > 0, squared, torch.inf)
        nearest, index = squared.topk(min(self.k, squared.shape[-1]), largest=False)
        kernel = torch.softmax(-nearest / (features.shape[-1] * self.scale), -1)  # a padded row has weight 0
        labels = torch.nn.functional.one_hot(stored["values"][index], task.classes)
        return (labels * kernel.unsqueeze(-1)).sum(-2)

    def predict(self, task, shared, personal, x):
        probabilities = task.apply(shared["model"], x).softmax(-1)
        if "keys" not in personal:
            return probabilities.log()
        weight = personal["weight"]
        return (weight * self.votes(task, shared, personal, x) + (1 - weight) * probabilities).log()
