"""Layers whose behaviour in training must not depend on padding, on the engine or on a global random state.

``swap`` replaces torch's batch norms, group norms and dropouts inside a module by the classes here. What a layer needs to know
about the batch under way (which rows are real, which random key it has) is set by ``batch_context``. What a module draws by other
means (``F.dropout``, ``torch.rand``) comes from torch's generator, which ``keyed`` starts anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.modules.batchnorm import _BatchNorm

from fedtailor.errors import InvalidArgument
from fedtailor.task.device import CPU, backend


class _Draws:
    """Counts the dropouts met so far in a batch, so that each has a mask of its own."""

    def __init__(self, met: int = 0) -> None:
        self.met = met

    def take(self) -> int:
        self.met += 1
        return self.met - 1


class BatchContext(NamedTuple):
    """The batch under way. ``row`` is given where a single row of it is passed through: its place."""

    mask: Tensor | None
    key: Tensor | None
    draws: _Draws
    row: Tensor | None = None


NO_BATCH = BatchContext(None, None, _Draws())  # outside a batch: no mask, no key
_batch: ContextVar[BatchContext] = ContextVar("batch", default=NO_BATCH)


@contextmanager
def batch_context(mask: Tensor | None, key: Tensor | None, row: Tensor | None = None) -> Iterator[None]:
    token = _batch.set(BatchContext(mask, key, _Draws(), row))
    try:
        yield
    finally:
        _batch.reset(token)


@contextmanager
def keyed(key: int | Tensor | None, device: torch.device = CPU) -> Iterator[None]:
    """Start torch's generators (the CPU's and the device's) from ``key`` inside; outside they go on as if nothing had been drawn.
    None leaves them alone, and so does a key that belongs to ``vmap``, whose clients share one generator: there the engine
    refuses draws."""
    if key is None or _is_of_vmap(key):
        yield
        return
    own = torch.default_generator if device.type == "cpu" else backend(device).generator(device)
    generators = [torch.default_generator, *([] if own is None or own is torch.default_generator else [own])]
    states = [generator.get_state() for generator in generators]
    word = int(key) % 2**64
    for generator in generators:
        generator.manual_seed(word)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _is_of_vmap(key: int | Tensor) -> bool:
    """Return whether a key belongs to clients that are computed at once, also where a derivative is taken inside ``vmap``."""
    while isinstance(key, Tensor) and _functorch.is_functorch_wrapped_tensor(key):
        if _functorch.is_batchedtensor(key):
            return True
        key = _functorch.get_unwrapped(key)
    return False


def under_way() -> BatchContext:
    return _batch.get()


@contextmanager
def rehearsed() -> Iterator[None]:
    """Repeat after this context the dropouts drawn inside it, so that two versions of a layer share their masks."""
    context = _batch.get()
    token = _batch.set(context._replace(draws=_Draws(context.draws.met)))
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
        mask = _batch.get().mask
        if not self.training and self.track_running_stats:
            mean, var = (None if b is None else b.detach() for b in (self.running_mean, self.running_var))  # it moves by step one
            return F.batch_norm(input, mean, var, self.weight, self.bias, False, 0.0, self.eps)
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


class GroupNorm(nn.GroupNorm):
    """Group norm whose backward pass torch 2.13 survives: it crashes on an input in channels-last layout that needs no gradient,
    as behind a frozen convolution."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.contiguous() if torch.is_grad_enabled() and not input.requires_grad else input)


class Dropout(nn.Module):
    """Dropout whose mask is a function of (the batch's key, which call it is, the position): the same on every engine."""

    def __init__(self, p: float, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.whole_channels = p, whole_channels

    def forward(self, input: Tensor) -> Tensor:
        _, key, draws, row = _batch.get()
        if not self.training or self.p == 0:
            return input
        shape = input.shape[:2] + (1,) * (input.dim() - 2) if self.whole_channels else input.shape
        if key is None:
            raise InvalidArgument("a module with dropout needs a batch with a `key` when it trains")
        first = 0 if row is None else row * torch.Size(shape).numel()
        keep_mask = uniform(key, draws.take(), shape, first, input.device) >= self.p
        return input * keep_mask.to(input) / (1 - self.p)


def uniform(
    key: Tensor,
    stream: int,
    shape: torch.Size | tuple[int, ...],
    first: int | Tensor = 0,
    device: torch.device | None = None,
) -> Tensor:
    """Return uniform numbers in [0, 1): entry j depends on (key, stream, first + j) only (SplitMix64 on a counter).

    They are on ``device`` (None: where the key is); a single key may be on the CPU.
    """
    counter = torch.arange(int(torch.Size(shape).numel()), dtype=torch.int64, device=device or key.device).view(shape) + first
    start = _finalise(key + _signed(0x9E3779B97F4A7C15 * (stream + 1) % 2**64))
    word = _finalise(start + counter * _signed(0xD1342543DE82EF95))
    return ((word >> 40) & 0xFFFFFF).to(torch.float32) / 2**24


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _finalise(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def swap(module: nn.Module) -> nn.Module:
    """Replace, in place, every batch norm, group norm and dropout below ``module``; returns the module (itself perhaps replaced).

    A layer that stands in several places is replaced by one layer in all of them.
    """
    replacements: dict[nn.Module, nn.Module] = {}

    def walk(parent: nn.Module) -> nn.Module:
        if parent not in replacements:
            replacements[parent] = _replacement(parent) or parent
            if isinstance(parent, (nn.Embedding, nn.EmbeddingBag)):
                parent.sparse = False  # the same gradient, in the form that is averaged
            if replacements[parent] is parent:
                for name, child in parent._modules.items():
                    if child is not None:
                        parent._modules[name] = walk(child)
        return replacements[parent]

    return walk(module)


def _replacement(layer: nn.Module) -> nn.Module | None:
    if isinstance(layer, _BatchNorm) and not isinstance(layer, BatchNorm):
        if layer.momentum is None:
            raise InvalidArgument("batch norm with momentum=None keeps a count that cannot be averaged; give a momentum")
        new = BatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        new._parameters, new._buffers = layer._parameters, layer._buffers
        return new.train(layer.training)
    if type(layer) is nn.GroupNorm:
        same = GroupNorm(layer.num_groups, layer.num_channels, layer.eps, layer.affine)
        same._parameters = layer._parameters
        return same.train(layer.training)
    if type(layer) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
        return Dropout(layer.p, type(layer) is not nn.Dropout).train(layer.training)  # type: ignore[arg-type]
    return None
