"""Data-free terms added to the risk: a pull towards a centre and a slope. Their gradient is added apart from the risk's,
so that a closed-form or privatised gradient of the risk stays what it is. Buffers are never penalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtailor import tree


@dataclass(frozen=True)
class Penalty:
    """The penalty pull/2 ||p - center||^2 + <slope, p>, over the parameters (not the buffers)."""

    pull: float | Tensor = 0.0
    center: Any = None
    slope: Any = None

    def __add__(self, other: Penalty) -> Penalty:
        if (self.center is not None and other.center is not None) or (self.slope is not None and other.slope is not None):
            raise ValueError("two penalties of the same kind cannot be added; merge them by hand")
        by_center = self if self.center is not None else other
        return Penalty(by_center.pull, by_center.center, self.slope if self.slope is not None else other.slope)

    def tensors(self) -> list[Any]:
        """Return the trees of tensors that the penalty is made of."""
        return [part for part in (self.pull, self.center, self.slope) if not isinstance(part, int | float | None)]

    def value(self, params: Any) -> Tensor:
        terms = [torch.zeros(())]
        for i, (path, leaf) in enumerate(tree.items(params)):
            if tree.is_buffer(path):
                continue
            if self.center is not None:
                terms.append(self.pull / 2 * ((leaf - tree.leaves(self.center)[i]) ** 2).sum())
            if self.slope is not None:
                terms.append((tree.leaves(self.slope)[i] * leaf).sum())
        return sum(terms)  # type: ignore[return-value]


def prox(center: Any, weight: float | Tensor) -> Penalty:
    """Return the penalty weight/2 ||p - center||^2, with gradient weight (p - center)."""
    return Penalty(pull=weight, center=center)


def linear(slope: Any) -> Penalty:
    """Return the penalty <slope, p>, with gradient slope."""
    return Penalty(slope=slope)


def aligned(branch: Any, params: Any) -> list[Tensor | None] | None:
    """Return the leaves of a center or slope in the order of ``params``; a flat one may omit names (no pull there)."""
    if branch is None:
        return None
    if all(isinstance(leaf, Tensor) for leaf in params.values()):
        return [branch.get(name) for name in params]
    return tree.leaves(branch)


def add_gradient(
    grads: Sequence[Tensor | None],
    params: Sequence[Tensor],
    buffers: Sequence[bool],
    rates: Sequence[float],
    pull: float | Tensor,
    center: Sequence[Tensor | None] | None,
    slope: Sequence[Tensor | None] | None,
    plain: bool = False,
) -> list[Tensor | None]:
    """Return the sum of the penalty's gradient and the risk's (new tensors: the risk's gradients are not changed).

    ``plain`` says that no tensor belongs to ``vmap`` or to the tape, so that memory may be used again.

    A gradient of None is zero: the parameter is frozen, or the risk does not depend on it.
    """
    out = list(grads)
    for i, (param, is_buffer, rate) in enumerate(zip(params, buffers, rates, strict=True)):
        if is_buffer or not rate:
            continue
        leaf_center = center[i] if center is not None else None
        if leaf_center is not None:
            pulled, grad = _scaled(param - leaf_center, pull), out[i]
            out[i] = pulled.add_(grad) if plain and grad is not None else _sum(grad, pulled)
        if slope is not None:
            out[i] = _sum(out[i], slope[i])
    return out


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _scaled(difference: Tensor, pull: float | Tensor) -> Tensor:
    """Return pull * difference, where ``pull`` may hold one number per client (the first axis); ``difference`` is used up."""
    if isinstance(pull, Tensor):
        return pull.view(-1, *[1] * (difference.dim() - 1)) * difference if pull.dim() else difference * pull
    return difference.mul_(pull)
