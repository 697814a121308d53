"""Linear layers with ReLU between them: the gradient of their risk for many clients at once, by the chain rule written out.

Models and rows are stacked along a client axis. Weights are best given with their transposes contiguous (``laid_out``): a batch
of small products takes a fraction of the time then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.task.kinds import Kind
from fedtailor.task.linear import Batch, Model, mean_slopes, stacked_slopes

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class DenseForms:
    """The risk of such a network with the loss of ``kind``; ``forward`` is the task's, for which the rules were read off."""

    kind: Kind
    forward: Callable[..., Any]
    layers: tuple[str, ...]  # the paths of the linear layers; between two of them there is a ReLU
    flat: bool  # rows are flattened first

    @staticmethod
    def of(module: nn.Module, kind: Kind, forward: Callable[..., Any]) -> DenseForms | None:
        """Return the forms of a module; None if it is another network."""
        if type(module) is not nn.Sequential or _hooked(module):
            return None
        parts = list(module.named_children())
        flat = bool(parts) and type(parts[0][1]) is nn.Flatten
        if flat and (parts[0][1].start_dim, parts[0][1].end_dim) != (1, -1):
            return None
        parts = parts[flat:]
        kinds: Sequence[type[nn.Module]] = [nn.ReLU if i % 2 else nn.Linear for i in range(len(parts))]
        if len(parts) < 3 or len(parts) % 2 == 0 or any(type(part) is not k for (_, part), k in zip(parts, kinds, strict=True)):
            return None
        return DenseForms(kind, forward, tuple(path for path, _ in parts[::2]), flat)

    def fits(self, forward: Callable[..., Any] | None, example_loss: Callable[..., Tensor]) -> bool:
        """Return whether a task's functions are still those that the forms were derived for."""
        return forward == self.forward and example_loss == self.kind.example_loss

    def takes(self, batch: Batch) -> bool:
        """Return whether a batch [clients, rows, ...] has one vector and one label (or vector of targets) in a row."""
        return (self.flat or batch["x"].dim() == 3) and (not self.kind.softmax or batch["y"].dim() == 2)

    def gradient(self, model: Model, batch: Batch) -> Model:
        """Return the gradient for stacked models and batches."""
        inputs = [batch["x"].flatten(2)]
        for path in self.layers:
            outputs = _affine(inputs[-1], model, path)
            inputs.append(outputs.relu_() if path != self.layers[-1] else outputs)
        slope = mean_slopes(stacked_slopes(self.kind, inputs.pop(), batch["y"]), batch)
        gradient: dict[str, Tensor] = {}
        for path, given in zip(reversed(self.layers), reversed(inputs), strict=True):
            gradient[f"{path}.weight"] = (given.mT @ slope).mT
            if f"{path}.bias" in model:
                gradient[f"{path}.bias"] = slope.sum(1)
            if path != self.layers[0]:
                slope = torch.ops.aten.threshold_backward(slope @ model[f"{path}.weight"], given, 0)
        return gradient


def _affine(x: Tensor, model: Mapping[str, Tensor], path: str) -> Tensor:
    weight, bias = model[f"{path}.weight"].mT, model.get(f"{path}.bias")
    return x @ weight if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)


def _hooked(module: nn.Module) -> bool:
    return any(getattr(part, name) for part in module.modules() for name in HOOKS)
