"""A linear model as functions: its logits, and in closed form the gradient of its risk and the clipped gradients of its rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.task.kinds import Kind
from fedtailor.task.rows import Sums, shrink

Model = dict[str, Tensor]
Batch = Mapping[str, Tensor]
SMALLEST = 1e-30  # sum of weights by which is divided


def weights_of(batch: Batch) -> Tensor | None:
    """Return the mask of a batch times the rows' own weights; None where there is neither."""
    mask, weight = batch.get("mask"), batch.get("weight")
    if weight is None:
        return mask
    return weight if mask is None else weight * mask


def linear_apply(model: Model, x: Tensor) -> Tensor:
    """Return the logits of flat rows."""
    return F.linear(x.flatten(1), model["weight"], model.get("bias"))


@dataclass(frozen=True)
class LinearForms:
    """The closed forms of a linear model's risk with the loss of ``kind``."""

    kind: Kind

    def fits(self, apply: Callable[..., Tensor], example_loss: Callable[..., Tensor]) -> bool:
        """Return whether a task's functions are still the model and the loss that the forms were derived for."""
        return apply is linear_apply and example_loss == self.kind.example_loss

    def gradient(self, model: Model, batch: Batch) -> Model:
        """Return the gradient: weights [.., K, d], rows [.., B, d], with or without a client axis."""
        x, residual = self._residual(model, batch)
        mask = weights_of(batch)
        if mask is None:
            residual /= x.shape[-2]
        else:
            least = SMALLEST if "weight" in batch else 1
            residual *= (mask / mask.sum(-1, keepdim=True).clamp(min=least)).unsqueeze(-1)
        out = {"weight": residual.transpose(-1, -2) @ x}
        if "bias" in model:
            out["bias"] = residual.sum(-2)
        return out

    def clipped(self, model: Model, batch: Batch, clip: float, names: Collection[str]) -> Sums:
        """Return the sum of clipped gradients: a row's is residual x', of squared norm |residual|^2 |x|^2."""
        x, residual = self._residual(model, batch)
        reach = x.square().sum(-1) * float("weight" in names) + float("bias" in names)
        factor = shrink((residual.square().sum(-1) * reach).sqrt(), clip)
        mask = batch.get("mask")
        residual *= (factor if mask is None else factor * mask).unsqueeze(-1)
        sums = {"weight": lambda: residual.transpose(-1, -2) @ x, "bias": lambda: residual.sum(-2)}
        return {name: sums[name]() for name in names}

    def _residual(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the flat rows, and the gradients of their losses at the logits."""
        weight = model["weight"]
        x = batch["x"].flatten(weight.dim() - 1)
        if "bias" in model:
            product = torch.baddbmm if weight.dim() == 3 else torch.addmm
            logits = product(model["bias"].unsqueeze(-2), x, weight.transpose(-1, -2))
        else:
            logits = x @ weight.transpose(-1, -2)
        return x, self.kind.residual(logits, batch["y"])
