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
FEW = 32  # outputs


def weights_of(batch: Batch) -> Tensor | None:
    """Return the mask of a batch times the rows' own weights; None where there is neither."""
    mask, weight = batch.get("mask"), batch.get("weight")
    if weight is None:
        return mask
    return weight if mask is None else weight * mask


def mean_slopes(residual: Tensor, batch: Batch) -> Tensor:
    """Turn the slopes of rows' losses [.., B, outputs] into those of their mean over a batch, in place."""
    mask = weights_of(batch)
    if mask is None:
        residual *= 1 / residual.shape[-2]  # as with a mask, to the last bit
    else:
        least = SMALLEST if "weight" in batch else 1
        residual *= (mask / mask.sum(-1, keepdim=True).clamp(min=least)).unsqueeze(-1)
    return residual


def stacked_slopes(kind: Kind, logits: Tensor, y: Tensor) -> Tensor:
    """Return the slopes of rows' losses at their logits [clients, rows, outputs]."""
    if not kind.softmax or logits.shape[-1] > FEW or y.dim() != 2:
        return kind.residual(logits, y)
    across = torch.softmax(logits.mT.contiguous(), 1)  # along a short last axis it takes ten times as long
    return across.scatter_add_(1, y.unsqueeze(1), across.new_full((), -1.0).expand(len(y), 1, y.shape[1])).mT.contiguous()


def laid_out(leaf: Tensor) -> Tensor:
    """Return a stacked leaf [clients, ...] whose matrices' transposes are contiguous, with which products of many small matrices
    take a fraction of the time; clients that share one matrix keep sharing it."""
    if leaf.dim() != 3:
        return leaf
    if leaf.stride(0) == 0 and len(leaf):
        return leaf[:1].mT.contiguous().mT.expand(leaf.shape)
    return leaf.mT.contiguous().mT


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
        residual = mean_slopes(residual, batch)
        out = {"weight": (x.mT @ residual).mT if residual.dim() == 3 else residual.mT @ x}
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
        return x, stacked_slopes(self.kind, logits, batch["y"]) if weight.dim() == 3 else self.kind.residual(logits, batch["y"])
