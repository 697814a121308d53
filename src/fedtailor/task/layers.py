"""Layers whose behaviour in training must not depend on padding, on the engine or on a global random state.

``swap`` replaces torch's batch norms and dropouts inside a module by the two classes here. What a layer needs to know
about the batch under way (which rows are real, which random key it has) is set by ``batch_context``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedtailor.errors import InvalidArgument

_batch: ContextVar[tuple[Tensor | None, Tensor | None]] = ContextVar("batch", default=(None, None))


@contextmanager
def batch_context(mask: Tensor | None, key: Tensor | None) -> Iterator[None]:
    token = _batch.set((mask, key))
    try:
        yield
    finally:
        _batch.reset(token)


class BatchNorm(_BatchNorm):
    """Batch norm over the real rows of a batch.

    A batch with a single value per channel has no variance: it is normalised with the running statistics, which it
    leaves alone. The buffers are rebound, never written in place, so one module serves many clients.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        mask, _ = _batch.get()
        if not self.training and self.track_running_stats:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        per_row = input[0, 0].numel()
        if mask is None and input.shape[0] * per_row > 1:
            mean, var = self._fresh(self.running_mean), self._fresh(self.running_var)
            output = F.batch_norm(input, mean, var, self.weight, self.bias, True, float(self.momentum or 0), self.eps)
            if self.track_running_stats:
                self.running_mean, self.running_var = mean, var
            return output
        rows = input.new_ones(input.shape[0]) if mask is None else mask.to(input)
        return self._weighted(input, rows, per_row)

    @staticmethod
    def _fresh(buffer: Tensor | None) -> Tensor | None:
        return None if buffer is None else buffer.detach().clone()

    def _weighted(self, input: Tensor, rows: Tensor, per_row: int) -> Tensor:
        axes = [0, *range(2, input.dim())]
        wide = [-1, *[1] * (input.dim() - 1)]
        channel = [1, -1, *[1] * (input.dim() - 2)]
        count = rows.sum() * per_row
        weight = rows.view(wide) / count.clamp(min=1)
        mean = (input * weight).sum(axes)
        var = ((input - mean.view(channel)) ** 2 * weight).sum(axes)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            old_mean, old_var = self.running_mean.detach(), self.running_var.detach()
            enough = count > 1
            keep = float(self.momentum or 0) * enough.to(input)
            unbiased = var.detach() * count / (count - 1).clamp(min=1)
            self.running_mean = old_mean + keep * (mean.detach() - old_mean)
            self.running_var = old_var + keep * (unbiased - old_var)
            mean, var = torch.where(enough, mean, old_mean), torch.where(enough, var, old_var)
        output = (input - mean.view(channel)) / (var.view(channel) + self.eps).sqrt()
        if self.affine:
            output = output * self.weight.view(channel) + self.bias.view(channel)
        return output


class Dropout(nn.Module):
    """Dropout whose mask is a function of (the batch's key, this layer, the position): the same on every engine."""

    def __init__(self, p: float, layer: int, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.layer, self.whole_channels = p, layer, whole_channels

    def forward(self, input: Tensor) -> Tensor:
        _, key = _batch.get()
        if not self.training or self.p == 0:
            return input
        shape = input.shape[:2] + (1,) * (input.dim() - 2) if self.whole_channels else input.shape
        if key is None:
            raise InvalidArgument("a module with dropout needs a batch with a `key` when it trains")
        kept = uniform(key, self.layer, shape) >= self.p
        return input * kept.to(input) / (1 - self.p)


def uniform(key: Tensor, stream: int, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Uniform numbers in [0, 1): entry j depends on (key, stream, j) only (SplitMix64's finaliser on a counter)."""
    counter = torch.arange(int(torch.Size(shape).numel()), dtype=torch.int64, device=key.device).view(shape)
    word = _finalise(_finalise(key + _signed(0x9E3779B97F4A7C15) * (stream + 1)) + counter * _signed(0xD1342543DE82EF95))
    return ((word >> 40) & 0xFFFFFF).to(torch.float32) / 2**24


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _finalise(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def swap(module: nn.Module) -> nn.Module:
    """Replace, in place, every batch norm and dropout below ``module``; returns the module (itself perhaps replaced)."""
    counter = iter(range(1 << 20))

    def replacement(child: nn.Module) -> nn.Module | None:
        if isinstance(child, _BatchNorm) and not isinstance(child, BatchNorm):
            if child.momentum is None:
                raise InvalidArgument("batch norm with momentum=None keeps a count that cannot be averaged; give a momentum")
            new = BatchNorm(child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats)
            new.train(child.training)
            new._parameters, new._buffers = child._parameters, child._buffers
            return new
        if isinstance(child, _DropoutNd) and type(child) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
            return Dropout(child.p, next(counter), type(child) is not nn.Dropout).train(child.training)
        return None

    def walk(parent: nn.Module) -> None:
        for name, child in parent.named_children():
            new = replacement(child)
            if new is None:
                walk(child)
            else:
                setattr(parent, name, new)

    top = replacement(module)
    if top is not None:
        return top
    walk(module)
    return module
