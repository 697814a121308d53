"""What methods that work class by class share: how many rows of each class a client has, and the sums of their features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor import tree
from fedtailor.local import scan
from fedtailor.task import Task
from fedtailor.task.head import features, head_weight


def one_hot(classes: int, batch: Mapping[str, Any]) -> Tensor:
    """[rows, classes], or [rows, positions, classes]: a one at each label, nothing where a row or a position is padding."""
    y, mask = batch["y"], batch.get("mask")
    labels = F.one_hot(y.clamp(min=0), classes) * (y >= 0).unsqueeze(-1)
    return labels if mask is None else labels * mask.view(*mask.shape, *[1] * (labels.dim() - mask.dim()))


def count_labels(start: Tensor, data: Any) -> Tensor:
    """How many labels of each class there are in the batches of ``data``, added to ``start`` [classes]."""

    def add(total: Any, batch: Mapping[str, Any]) -> Any:
        return {"counts": total["counts"] + one_hot(len(start), batch).flatten(0, -2).sum(0).to(start)}

    return scan(add, {"counts": start}, data)["counts"]


def label_counts(task: Task, model: Any, data: Any) -> Tensor:
    """How many labels of each class there are in the batches of ``data``."""
    head = head_weight(task, model)
    return count_labels(head.new_zeros(len(head)), data)


def feature_sums(task: Task, model: Any, data: Any) -> dict[str, Tensor]:
    """``sums`` [classes, features] of what enters the head, in evaluation mode, and ``counts`` [classes] of rows."""

    def add(total: Any, batch: Mapping[str, Any]) -> Any:
        z = features(task, model, batch["x"])
        labels = one_hot(len(head_weight(task, model)), batch).to(z)
        return tree.add(total, {"sums": labels.T @ z, "counts": labels.sum(0)})

    with torch.no_grad():
        return scan(add, empty(task, model), data)


def empty(task: Task, model: Any) -> dict[str, Tensor]:
    """The sums before any row."""
    head = torch.zeros_like(head_weight(task, model))
    return {"sums": head, "counts": head[:, 0]}


def means(total: Mapping[str, Tensor]) -> Tensor:
    """Sums divided by their counts; zero where there is nothing."""
    return total["sums"] / total["counts"].clamp(min=torch.finfo(total["counts"].dtype).tiny).unsqueeze(-1)
