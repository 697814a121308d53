"""One loss per example, and the gradient of each loss with respect to the logits in closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Loss(NamedTuple):
    """``example(logits, y)`` has one number per example; ``residual(logits, y)`` is its gradient in the logits."""

    name: str
    kind: str
    example: Callable[[Tensor, Tensor], Tensor]
    residual: Callable[[Tensor, Tensor], Tensor]


PAD = -1  # the label of a position that is not there


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """With a label per position, [rows, positions], the mean over a row's real positions."""
    if y.dim() == 1:
        return F.cross_entropy(logits, y, reduction="none")
    each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none", ignore_index=PAD).view(y.shape)
    return each.sum(1) / targets("classification", y).clamp(min=1)


def targets(kind: str, y: Tensor) -> Tensor:
    """How many labels each row of y has: 1, or where there is one per position, the number that are not padding."""
    sequences = kind == "classification" and y.dim() == 2
    return (y != PAD).sum(1) if sequences else torch.ones(len(y), dtype=torch.int64, device=y.device)


def _cross_entropy_residual(logits: Tensor, y: Tensor) -> Tensor:
    probabilities = torch.softmax(logits, -1)
    minus_one = probabilities.new_full((), -1.0).expand(*y.shape, 1)
    return probabilities.scatter_add_(-1, y.unsqueeze(-1), minus_one)


def _like(y: Tensor, logits: Tensor) -> Tensor:
    return y.reshape(logits.shape).to(logits.dtype)


def _per_row(values: Tensor) -> Tensor:
    """Mean over all axes but the first (a model may give one number per row with no second axis)."""
    return values.reshape(len(values), -1).mean(1)


def _mse(logits: Tensor, y: Tensor) -> Tensor:
    """Half the squared error, so that the gradient of least squares is X'(Xw - y)/n."""
    return 0.5 * _per_row((logits - _like(y, logits)) ** 2)


def _mse_residual(logits: Tensor, y: Tensor) -> Tensor:
    return (logits - _like(y, logits)) / logits.shape[-1]


def _bce(logits: Tensor, y: Tensor) -> Tensor:
    return _per_row(F.binary_cross_entropy_with_logits(logits, _like(y, logits), reduction="none"))


def _bce_residual(logits: Tensor, y: Tensor) -> Tensor:
    return (torch.sigmoid(logits) - _like(y, logits)) / logits.shape[-1]


LOSSES = {
    "cross_entropy": Loss("cross_entropy", "classification", _cross_entropy, _cross_entropy_residual),
    "mse": Loss("mse", "regression", _mse, _mse_residual),
    "bce": Loss("bce", "multilabel", _bce, _bce_residual),
}
BY_KIND = {loss.kind: loss for loss in LOSSES.values()}
