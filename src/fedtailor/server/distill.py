"""Distillation on the server: what the clients' models say about public rows, averaged as the uploads come in, and a student
that learns to say the same.

No upload is kept: memory is for one model and the outputs on the rows, whatever the number of clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.data.batches import Batches
from fedtailor.local import Adam, descend
from fedtailor.local.meter import metered
from fedtailor.server.at_once import Apply, at_once
from fedtailor.server.reduce import Reduce, mean
from fedtailor.task import Task

Model = Mapping[str, Tensor]
CHUNK = 128  # rows at once: with more, convolutions take longer per row
PARTS, PARTED = 2, 32  # a step of a student on images is taken in so many parts, from so many rows on: on any number of cores


def outputs(task: Task, model: Any, x: Tensor) -> Tensor:
    """A model's outputs on ``x`` in evaluation mode, computed ``CHUNK`` rows at a time."""

    def answer(part: Tensor) -> Callable[[Apply], Tensor]:
        def job(apply: Apply) -> Tensor:
            with torch.no_grad():
                return apply(model, in_fast_layout(task, part))

        return job

    return torch.cat(at_once(task, [answer(part) for part in x.split(CHUNK)], x))


def in_fast_layout(task: Task, x: Tensor) -> Tensor:
    """``x`` in the memory layout in which the network's convolutions are fastest."""
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

    @property
    def streams(self) -> bool:
        return True

    def start(self) -> Any:
        return mean.start(), None, 0

    def add(self, state: Any, uploads: Any, weights: Tensor, places: Tensor) -> Any:
        mean_state, sums, count = state
        for i in range(len(weights)):
            logits = outputs(self.task, self.model(tree.map(lambda leaf, i=i: leaf[i], uploads)), self.x)
            target = logits if self.teach == "logits" else self.task.kind.soft(logits, self.temperature)
            new = {"target": target, "probabilities": self.task.kind.soft(logits)}
            sums = new if sums is None else tree.add(sums, new)
        return mean.add(mean_state, uploads, weights, places), sums, count + len(weights)

    def finish(self, state: Any) -> Any:
        mean_state, sums, count = state
        means = tree.map(lambda leaf: leaf / count, sums)
        if self.teach == "logits":
            means["target"] = self.task.kind.soft(means["target"], self.temperature)
        return {**mean.finish(mean_state), "teachers": means}


def distill(
    task: Task,
    student: Any,
    x: Tensor,
    target: Tensor,
    index: NDArray[np.int64],
    lr: float,
    temperature: float = 1.0,
    schedule: str = "constant",
    frozen: Mapping[str, float] | None = None,
) -> Any:
    """The student after a step of Adam on each batch of rows (``index``, [steps, batch], -1 where there is none).

    It learns in evaluation mode: no dropout, norms with their running statistics, which stay as they are. ``cosine`` takes the
    rate of step r of R to lr (1 + cos(pi r/R))/2. ``frozen`` has rate 0 for what must not move. The gradient on a batch of
    images is the sum of those on its two halves, which are computed at once where there are two cores.
    """

    def cosine_rate(step: int) -> float:
        return lr * (1 + math.cos(math.pi * step / len(index))) / 2

    rates = {**{name: 0.0 for name in student if tree.is_buffer(name)}, **(frozen or {})}
    batches = Batches(x, target, index, np.zeros(len(index), np.int64))
    moving = [name for name in student if rates.get(name, 1.0)]
    taught = replace(task, gradient=partial(_lesson, task, moving, temperature), layered=None)
    with metered(None):  # the server's work is no client's
        return descend(taught.risk, student, batches, Adam(lr=lr if schedule == "constant" else cosine_rate), rates=rates)


def _lesson(
    task: Task, moving: Sequence[str], temperature: float, model: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradient, in the parameters that move, of the mean gap between a student's answers and the targets."""
    x, y = batch["x"], batch["y"]

    def learn(rows: Tensor, target: Tensor) -> Callable[[Apply], Sequence[Tensor]]:
        def job(apply: Apply) -> Sequence[Tensor]:
            free = {name: model[name].detach().requires_grad_() for name in moving}
            gap = task.kind.gap(apply({**model, **free}, in_fast_layout(task, rows)), target, temperature)
            return torch.autograd.grad(
                gap.mean() * (len(rows) / len(x)), list(free.values()), allow_unused=True, materialize_grads=True
            )

        return job

    count = PARTS if x.dim() == 4 and len(x) >= PARTED else 1
    parts = zip(x.tensor_split(count), y.tensor_split(count), strict=True)
    first, *others = at_once(task, [learn(*part) for part in parts], x)
    grads = dict(zip(moving, first, strict=True))
    for other in others:
        grads = {name: grad + more for (name, grad), more in zip(grads.items(), other, strict=True)}
    return grads


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean over rows of the L1 distance between two sets of probabilities."""
    return (a - b).abs().flatten(1).sum(1).mean()
