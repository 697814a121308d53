"""Losses of numbers that outliers do not dominate."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedtailor.errors import InvalidArgument

TUNING = 1.345  # deviations beyond which Huber's loss is linear: 95 % efficient where errors are normal (Huber 1981)
NORMAL = 1.4826  # deviation of a normal law over its median absolute deviation


@dataclass(frozen=True)
class Huber:
    """Half the squared error up to ``delta``, linear beyond; mean over outputs, one number per row."""

    delta: float

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        each = F.huber_loss(logits, y.reshape(logits.shape).to(logits.dtype), reduction="none", delta=self.delta)
        return each.reshape(len(each), -1).mean(1)


def huber(name: str, y: Tensor) -> tuple[Huber, str]:
    """Return the loss of this name and a note; without a delta it is 1.345 robust deviations of the training targets y."""
    _, at, number = name.strip().partition("@")
    if at:
        try:
            delta = float(number)
        except ValueError:
            delta = -1.0
        if not 0 < delta < float("inf"):
            raise InvalidArgument(f"the delta of {name!r} must be a positive number; write it as huber@2.5")
        return Huber(delta), f"Huber's loss is linear beyond an error of {delta:g}."
    targets = y.double().flatten()
    deviation = NORMAL * float((targets - targets.median()).abs().median()) or float(targets.std()) or 1.0
    delta = TUNING * deviation
    why = f"Huber's loss is linear beyond an error of {delta:.4g}, {TUNING} robust deviations of the training labels"
    return Huber(delta), f"{why}; --loss huber@DELTA sets it."
