"""Per-client measures from logits: accuracy or mean squared error, loss, AUC, and who is right where."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor

from fedtailor.task import Task
from fedtailor.task.losses import PAD, targets

Numbers = NDArray[np.float64]


def score_name(kind: str) -> str:
    """What a summary calls its main measure."""
    return "mse" if kind == "regression" else "acc"


def hits(kind: str, logits: Tensor, y: Tensor) -> Tensor:
    """Per row (or position): 1 where the class is right (share of right labels, multi-label); the squared error in regression."""
    if kind == "classification":
        return (logits.argmax(-1) == y).double()
    if kind == "multilabel":
        return ((logits > 0) == (y.reshape(logits.shape) > 0.5)).double().flatten(y.dim() - 1).mean(-1)
    apart = (logits - y.reshape(logits.shape).to(logits)).double() ** 2
    return apart.reshape(*logits.shape[:-1], -1).mean(-1)


def scored(task: Task, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Which targets y [clients, rows] or [clients, rows, positions] count in the accuracy: the real ones, of classes that are
    scored."""
    sequences = task.kind == "classification" and y.dim() == 3
    real = torch.ones(y.shape[:2], dtype=torch.bool) if mask is None else mask > 0
    if sequences:
        real = real.unsqueeze(-1) & (y != PAD)
    return real if task.unscored is None or task.kind != "classification" else real & (y != task.unscored)


def measure(task: Task, own: Tensor, shared: Tensor | None, y: Tensor, mask: Tensor) -> dict[str, Numbers]:
    """Measures of a chunk of clients: logits [clients, rows, outputs] or [clients, rows, positions, outputs]; each result has one
    number per client. ``rows`` counts what the accuracy is the mean over: rows or positions.
    """
    real = scored(task, y, mask)
    rows = real.flatten(1).sum(1).double()
    weight = targets(task.kind, y.flatten(0, 1)).view(mask.shape) * mask

    def mean(values: Tensor) -> Numbers:
        return ((values.double() * real).flatten(1).sum(1) / rows).numpy()

    def loss(logits: Tensor) -> Numbers:
        losses = task.example_loss(logits.flatten(0, 1), y.flatten(0, 1)).view(mask.shape).double()
        return ((losses * weight).sum(1) / weight.sum(1)).numpy()

    name = score_name(task.kind)
    mine = hits(task.kind, own, y)
    out = {"rows": rows.numpy(), f"{name}_personal": mean(mine), "loss_personal": loss(own)}
    if shared is not None:
        theirs = hits(task.kind, shared, y)
        out |= {f"{name}_global": mean(theirs), "loss_global": loss(shared)}
        if task.kind == "classification":
            a, b = mine > 0, theirs > 0
            out |= {"both_correct": mean(a & b), "global_only": mean(b & ~a), "personal_only": mean(a & ~b)}
    if task.kind == "multilabel" or (task.kind == "classification" and own.shape[-1] == 2):
        if real.dim() == 3:
            own, y, real = own.flatten(1, 2), y.flatten(1), real.flatten(1)
            shared = None if shared is None else shared.flatten(1, 2)
        out["auc_personal"] = _aucs(task.kind, own, y, real)
        if shared is not None:
            out["auc_global"] = _aucs(task.kind, shared, y, real)
    return out


def _aucs(kind: str, logits: Tensor, y: Tensor, mask: Tensor) -> Numbers:
    scores = (logits[..., 1] - logits[..., 0]).unsqueeze(-1) if kind == "classification" else logits
    return auc(scores.double().numpy(), y.reshape(scores.shape).numpy() > 0.5, mask.numpy())


def auc(scores: NDArray[Any], positive: NDArray[Any], mask: NDArray[Any]) -> Numbers:
    """Area under the ROC curve per client, by ranks (ties count half): scores and labels [clients, rows, labels].

    Mean over the labels of which a client has both kinds of rows; NaN if there is none.
    """
    real = mask[:, :, None]
    ranks = rankdata(np.where(real, scores, np.nan), axis=1, nan_policy="omit")
    p, n = (positive & real).sum(1), (~positive & real).sum(1)
    known = (p > 0) & (n > 0)
    above = np.where(positive & real, ranks, 0).sum(1) - p * (p + 1) / 2
    areas = np.where(known, above / np.where(known, p * n, 1), 0)
    return np.where(known.any(1), areas.sum(1) / np.maximum(known.sum(1), 1), np.nan)


def accuracy_on(task: Task, logits: Tensor, y: Tensor) -> Numbers:
    """Every client's main measure on common rows: logits [clients, rows, outputs], y [rows, ...]; NaN where no row counts."""
    wide = y.unsqueeze(0).expand(logits.shape[0], *y.shape)
    real = scored(task, wide)
    return ((hits(task.kind, logits, wide) * real).flatten(1).sum(1) / real.flatten(1).sum(1)).numpy()
