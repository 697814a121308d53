"""Per-client measures from logits: accuracy or mean squared error, loss, AUC, and who is right where."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data import rng
from fedtailor.task import Task
from fedtailor.task.kinds import PAD
from fedtailor.task.scores import Metric

Numbers = NDArray[np.float64]


def scored(task: Task, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return which targets y [clients, rows] or [clients, rows, positions] count in the accuracy: the real ones, of classes
    that are scored."""
    real = torch.ones(y.shape[:2], dtype=torch.bool) if mask is None else mask > 0
    if task.kind.softmax and y.dim() == 3:
        real = real.unsqueeze(-1) & (y != PAD)
    return real if task.unscored is None or not task.kind.softmax else real & (y != task.unscored)


def measure(task: Task, own: Tensor, shared: Tensor | None, y: Tensor, mask: Tensor, final: bool = True) -> dict[str, Numbers]:
    """Return the measures of a chunk of clients, one number per client each.

    Logits are [clients, rows, outputs] or [clients, rows, positions, outputs]. ``rows`` counts what accuracy is a mean over:
    rows or positions. ``final`` asks also for the measures that are for the end only.
    """
    real = scored(task, y, mask)
    rows = real.flatten(1).sum(1).double()
    weight = task.kind.targets(y.flatten(0, 1)).view(mask.shape) * mask

    def mean(values: Tensor) -> Numbers:
        return ((values.double() * real).flatten(1).sum(1) / rows).numpy()

    def loss(logits: Tensor) -> Numbers:
        losses = _losses(task, logits.flatten(0, 1), y.flatten(0, 1)).view(mask.shape).double()
        return ((losses * weight).sum(1) / weight.sum(1)).numpy()

    logits_by_side = {"personal": own, **({} if shared is None else {"global": shared})}
    hits = {"personal": task.kind.hits(own, y)}
    if shared is not None:
        hits["global"] = hits["personal"] if shared is own else task.kind.hits(shared, y)
    out = {"rows": rows.numpy()}
    for side, logits in logits_by_side.items():
        if side == "global" and shared is own:  # nobody has a model of its own: nothing is computed twice
            mine = {name.removesuffix("_personal"): values for name, values in out.items() if name.endswith("_personal")}
            out |= {f"{name}_global": values for name, values in mine.items()}
            continue
        for metric in (m for m in task.measured if final or not m.late):
            values = mean(hits[side]) if metric.clients is None else metric.clients(logits, y, real)
            out |= {} if values is None else {f"{metric.name}_{side}": values}
        out[f"loss_{side}"] = loss(logits)
    if task.kind.softmax and shared is not None:
        a, b = hits["personal"] > 0, hits["global"] > 0
        out |= {"both_correct": mean(a & b), "global_only": mean(b & ~a), "personal_only": mean(a & ~b)}
    return out


def _losses(task: Task, logits: Tensor, y: Tensor) -> Tensor:
    """Return the rows' losses; one of the user's own may draw, and write to what it is given."""
    if task.example_loss == task.kind.example_loss:
        return task.example_loss(logits, y)
    with rng.seeded(0):
        return task.example_loss(logits.clone(), y)


def accuracy_on(task: Task, logits: Tensor, y: Tensor, score: Metric | None = None) -> Numbers:
    """Return every client's ``score`` (by default the kind's) on common rows: logits [clients, rows, outputs], y [rows, ...]; NaN
    where it is not known."""
    targets = y.unsqueeze(0).expand(logits.shape[0], *y.shape)
    real = scored(task, targets)
    if score is not None and score.clients is not None:
        scores = score.clients(logits, targets, real)
        return np.full(len(logits), np.nan) if scores is None else scores
    return ((task.kind.hits(logits, targets) * real).flatten(1).sum(1) / real.flatten(1).sum(1)).numpy()
