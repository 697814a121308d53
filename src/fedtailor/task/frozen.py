"""The frozen part of a module, and the first layers whose output can therefore be computed once.

A parameter with ``requires_grad=False`` is frozen. A buffer goes with the nearest module around it that has parameters (for a
norm, the norm itself): it is frozen where all of these are. A frozen batch norm keeps its statistics, also in training.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fedtailor.task.layers import BatchNorm, Dropout, swap
from fedtailor.task.own import copied
from fedtailor.tree import BUFFER

KNOWN = ("torch.nn.", "fedtailor.")  # packages whose random or batch-dependent layers are all checked for here


def frozen_names(root: nn.Module) -> frozenset[str]:
    """Return the names, as in a model, of the parameters and statistics that never move."""
    frozen = {name for name, p in root.named_parameters() if not p.requires_grad}
    for name, value in root.named_buffers():
        if value.is_floating_point() and _is_frozen(root, name):
            frozen.add(BUFFER + name)
    return frozenset(frozen)


def _is_frozen(root: nn.Module, buffer: str) -> bool:
    owner = buffer.rpartition(".")[0]
    while owner and not any(True for _ in root.get_submodule(owner).parameters()):
        owner = owner.rpartition(".")[0]
    flags = [p.requires_grad for p in root.get_submodule(owner).parameters()]
    return bool(flags) and not any(flags)


def copies(root: nn.Module, frozen: frozenset[str]) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """Return a copy that evaluates, a copy that trains, and the frozen tensors, which both copies share."""
    evaluator = swap(copied(root)).eval()
    state = {**dict(evaluator.named_parameters()), **{BUFFER + name: b for name, b in evaluator.named_buffers()}}
    frozen_tensors = {name: value for name, value in state.items() if name in frozen}
    trainer = copy.deepcopy(evaluator, {id(value): value for value in frozen_tensors.values()}).train()
    for path, module in trainer.named_modules():
        buffers = [f"{BUFFER}{path}.{name}" if path else BUFFER + name for name in ("running_mean", "running_var")]
        if isinstance(module, (_BatchNorm, _NormBase)) and all(name in frozen for name in buffers):
            module.eval()
    return evaluator, trainer, {name: value.detach() for name, value in frozen_tensors.items()}


def prefix_length(trainer: nn.Module, chain: Sequence[str], frozen: frozenset[str]) -> int:
    """Return how many first layers of a chain always give the same output for a row; 0 if none of them has weights."""
    count, weights = 0, False
    for path in chain:
        layer = trainer.get_submodule(path)
        dot = f"{path}." if path else ""
        names = [dot + n for n, _ in layer.named_parameters()]
        names += [BUFFER + dot + n for n, b in layer.named_buffers() if b.is_floating_point()]
        if not all(name in frozen for name in names) or not all(_depends_on_row_only(m) for m in layer.modules()):
            break
        count, weights = count + 1, weights or bool(names)
    return count if weights else 0


def _depends_on_row_only(layer: nn.Module) -> bool:
    """Return whether a layer's output for a row depends on nothing but the row."""
    if isinstance(layer, (Dropout, _DropoutNd)):
        return layer.p == 0
    if isinstance(layer, BatchNorm):
        return not layer.training and layer.track_running_stats
    return type(layer).__module__.startswith(KNOWN) and not isinstance(layer, (nn.RReLU, nn.RNNBase))


class Segment(nn.Module):
    """Some layers of a chain, one after another, under the names they have in the whole network."""

    def __init__(self, whole: nn.Module, chain: Sequence[str]) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = whole._parameters, whole._buffers, whole._modules
        self.chain = tuple(chain)

    def __repr__(self) -> str:
        return "\n".join(f"{path}: {self.get_submodule(path)!r}" for path in self.chain)

    def forward(self, input: Tensor) -> Tensor:
        for path in self.chain:
            input = self.get_submodule(path)(input)
        return input
