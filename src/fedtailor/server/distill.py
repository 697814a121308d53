"""Distillation on the server: what the clients' models say about public rows, averaged as the uploads come in, and a student
that learns to say the same.

No upload is kept: memory is for one model and the outputs on the rows, whatever the number of clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.data.batches import Batches
from fedtailor.local import Adam, descend
from fedtailor.local.loop import metered
from fedtailor.server.reduce import Reduce, mean
from fedtailor.task import Task

Model = Mapping[str, Tensor]
CHUNK = 128  # rows at once: convolutions on more are slower for each


def soft(kind: str, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Class probabilities (of each label, multi-label) at a temperature; the outputs themselves in regression."""
    if kind == "classification":
        return torch.softmax(logits / temperature, -1)
    return torch.sigmoid(logits / temperature) if kind == "multilabel" else logits


def gap(kind: str, logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
    """Per row: KL(target || student) up to a constant of the target, summed over labels; half the squared error in regression."""
    if kind == "classification":
        return -(target * torch.log_softmax(logits / temperature, -1)).sum(-1)
    if kind == "multilabel":
        return F.binary_cross_entropy_with_logits(logits / temperature, target, reduction="none").flatten(1).sum(1)
    return 0.5 * (logits - target).square().flatten(1).sum(1)


def outputs(task: Task, model: Any, x: Tensor) -> Tensor:
    """A model's outputs in evaluation mode, part by part."""
    with torch.no_grad():
        return torch.cat([task.apply(model, laid(task, part)) for part in x.split(CHUNK)])


def laid(task: Task, x: Tensor) -> Tensor:
    """Images in the layout that the network's convolutions are fastest in."""
    return x.contiguous(memory_format=torch.channels_last) if task.channels_last and x.dim() == 4 else x


@dataclass(frozen=True, eq=False)
class Teachers(Reduce):
    """The mean of the uploads and, as ``teachers``, the plain mean over clients of what their models say about ``x``.

    ``model`` makes a model of an upload; the outputs are averaged as logits or as probabilities at ``temperature``
    (``target``), and as probabilities at temperature one (``probabilities``).
    """

    task: Task
    x: Tensor
    model: Callable[[Any], Any]
    teach: str = "logits"
    temperature: float = 1.0

    def start(self) -> Any:
        return mean.start(), None, 0

    def add(self, state: Any, uploads: Any, weights: Tensor, places: Tensor) -> Any:
        folded, said, count = state
        for i in range(len(weights)):
            logits = outputs(self.task, self.model(tree.map(lambda leaf, i=i: leaf[i], uploads)), self.x)
            target = logits if self.teach == "logits" else soft(self.task.kind, logits, self.temperature)
            new = {"target": target, "probabilities": soft(self.task.kind, logits)}
            said = new if said is None else tree.add(said, new)
        return mean.add(folded, uploads, weights, places), said, count + len(weights)

    def finish(self, state: Any) -> Any:
        folded, said, count = state
        found = tree.map(lambda leaf: leaf / count, said)
        if self.teach == "logits":
            found["target"] = soft(self.task.kind, found["target"], self.temperature)
        return {**mean.finish(folded), "teachers": found}


def distill(
    task: Task,
    student: Any,
    x: Tensor,
    target: Tensor,
    index: NDArray[np.int64],
    lr: float,
    temperature: float = 1.0,
    schedule: str = "constant",
    still: Mapping[str, float] | None = None,
) -> Any:
    """The student after a step of Adam on each batch of rows (``index``, [steps, batch], -1 where there is none).

    It learns in evaluation mode: no dropout, norms with their running statistics, which stay as they are. ``cosine`` takes the
    rate of step r of R to lr (1 + cos(pi r/R))/2. ``still`` has rate 0 for what must not move.
    """

    def risk(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return gap(task.kind, task.apply(model, laid(task, batch["x"])), batch["y"], temperature).mean()

    def falling(step: int) -> float:
        return lr * (1 + math.cos(math.pi * step / len(index))) / 2

    hold = {**{name: 0.0 for name in student if tree.is_buffer(name)}, **(still or {})}
    lessons = Batches(x, target, index, np.zeros(len(index), np.int64))
    with metered(None):  # the server's work is no client's
        return descend(risk, student, lessons, Adam(lr=lr if schedule == "constant" else falling), rates=hold)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean over rows of the L1 distance between two sets of probabilities."""
    return (a - b).abs().flatten(1).sum(1).mean()
