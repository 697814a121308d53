"""What is predicted: a class, several labels, or numbers. Everything that depends on it is in the kind.

A kind is the string that users write (``task="regression"``) and files hold. It knows its loss, its metrics, how predictions are
compared with targets and written down, and the constants of its loss. Another metric of a kind is an entry of its ``metrics``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.errors import InvalidArgument
from fedtailor.task.scores import (
    ACCURACY,
    AUC_OF_LABELS,
    LOG_LOSS_OF_LABELS,
    OF_CLASSES,
    OF_NUMBERS,
    RIGHT_LABELS,
    SQUARED_ERROR,
    Metric,
    Numbers,
)

PAD = -1  # the label of a padded position


class Kind(str, ABC):
    """One kind of prediction; equal to its name.

    ``softmax``: every row (or position) has one class, and its outputs compete. ``least_squares``: targets are numbers. Where
    neither holds, a row has several labels of 0 or 1. ``curvature`` and ``slope2`` bound the second derivative and the squared
    first derivative of the loss in the logits, before the mean over outputs is taken (see ``averaged``).
    """

    loss: str
    metrics: tuple[Metric, ...]  # the first is the main score
    softmax = False
    least_squares = False
    curvature: float
    slope2: float

    def __reduce__(self) -> Any:
        return kind_of, (str(self),)

    @property
    def score(self) -> Metric:
        return self.metrics[0]

    def averaged(self, outputs: int) -> int:
        """Return over how many outputs a row's loss is the mean."""
        return 1 if self.softmax else outputs

    def per_position(self, y: Tensor) -> bool:
        """Return whether y [rows, ...] has a label for every position of a row."""
        return self.softmax and y.dim() == 2

    def targets(self, y: Tensor) -> Tensor:
        """Return how many labels each row of y has: 1, or with one per position, the number that are not padding."""
        return (y != PAD).sum(1) if self.per_position(y) else torch.ones(len(y), dtype=torch.int64, device=y.device)

    @abstractmethod
    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each row; with a label per position, the mean over the row's real ones."""

    @abstractmethod
    def residual(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the loss in the logits, in closed form."""

    @abstractmethod
    def hits(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the main score of each row (or position)."""

    @abstractmethod
    def soft(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """Return what the logits predict: probabilities at a temperature, or the numbers themselves."""

    @abstractmethod
    def gap(self, logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
        """Return how far each row's logits are from soft targets: KL(target || student) up to a constant of the target, summed
        over labels; of numbers, half the squared error."""

    def written(self, out: Tensor, classes: Sequence[str], restore: Callable[[Numbers], Numbers]) -> dict[str, Any]:
        """Return columns of a table of predictions; ``restore`` brings numbers back to the units of the label."""
        return dict(zip((f"probability {name}" for name in classes), self.soft(out).double().numpy().T, strict=False))


class _Classification(Kind):
    loss = "cross_entropy"
    metrics = (ACCURACY, *OF_CLASSES)
    softmax = True
    curvature, slope2 = 0.5, 2.0  # Boehning 1992

    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        if y.dim() == 1:
            # F.cross_entropy, bit for bit; under vmap torch takes that apart in Python, and imports sympy to do so
            return -torch.log_softmax(logits, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none", ignore_index=PAD).view(y.shape)
        return each.sum(1) / self.targets(y).clamp(min=1)

    def residual(self, logits: Tensor, y: Tensor) -> Tensor:
        probabilities = torch.softmax(logits, -1)
        minus_one = probabilities.new_full((), -1.0).expand(*y.shape, 1)
        return probabilities.scatter_add_(-1, y.unsqueeze(-1), minus_one)

    def hits(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits.argmax(-1) == y).double()

    def soft(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        return torch.softmax(logits / temperature, -1)

    def gap(self, logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
        return -(target * torch.log_softmax(logits / temperature, -1)).sum(-1)

    def written(self, out: Tensor, classes: Sequence[str], restore: Callable[[Numbers], Numbers]) -> dict[str, Any]:
        best = self.soft(out).argmax(1).numpy()
        return {"prediction": np.asarray(classes, object)[best], **super().written(out, classes, restore)}


class _MultiLabel(Kind):
    loss = "bce"
    metrics = (RIGHT_LABELS, AUC_OF_LABELS, LOG_LOSS_OF_LABELS)
    curvature, slope2 = 0.25, 1.0

    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return _per_row(F.binary_cross_entropy_with_logits(logits, _like(y, logits), reduction="none"))

    def residual(self, logits: Tensor, y: Tensor) -> Tensor:
        return (torch.sigmoid(logits) - _like(y, logits)) / logits.shape[-1]

    def hits(self, logits: Tensor, y: Tensor) -> Tensor:
        return ((logits > 0) == (y.reshape(logits.shape) > 0.5)).double().flatten(y.dim() - 1).mean(-1)

    def soft(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        return torch.sigmoid(logits / temperature)

    def gap(self, logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits / temperature, target, reduction="none").flatten(1).sum(1)


class _Regression(Kind):
    loss = "mse"
    metrics = (SQUARED_ERROR, *OF_NUMBERS)
    least_squares = True
    curvature, slope2 = 1.0, math.inf

    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Half the squared error, so that the gradient of least squares is X'(Xw - y)/n."""
        return 0.5 * _per_row((logits - _like(y, logits)) ** 2)

    def residual(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits - _like(y, logits)) / logits.shape[-1]

    def hits(self, logits: Tensor, y: Tensor) -> Tensor:
        squared_error = (logits - _like(y, logits)).double() ** 2
        return squared_error.reshape(*logits.shape[:-1], -1).mean(-1)

    def soft(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        return logits

    def gap(self, logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
        return 0.5 * (logits - target).square().flatten(1).sum(1)

    def written(self, out: Tensor, classes: Sequence[str], restore: Callable[[Numbers], Numbers]) -> dict[str, Any]:
        values = restore(out.reshape(len(out), -1).double().numpy())
        names = ["prediction"] if values.shape[1] == 1 else [f"prediction {i}" for i in range(values.shape[1])]
        return dict(zip(names, values.T, strict=True))


def _like(y: Tensor, logits: Tensor) -> Tensor:
    return y.reshape(logits.shape).to(logits.dtype)


def _per_row(values: Tensor) -> Tensor:
    """Return the mean over all axes but the first (a model may give one number per row with no second axis)."""
    return values.reshape(len(values), -1).mean(1)


CLASSIFICATION, REGRESSION, MULTILABEL = _Classification("classification"), _Regression("regression"), _MultiLabel("multilabel")
KINDS: dict[str, Kind] = {str(kind): kind for kind in (CLASSIFICATION, REGRESSION, MULTILABEL)}


def kind_of(name: str) -> Kind:
    if name not in KINDS:
        raise InvalidArgument(f"unknown task {name!r}; use one of {', '.join(KINDS)}")
    return KINDS[name]
