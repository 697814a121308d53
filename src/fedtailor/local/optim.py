"""Optimisers over lists of tensors that the caller owns: steps are taken in place, state is made fresh per descent.

Leaves may carry a first client axis; all rules are element-wise but the projection, which is told about it. Buffers (batch
norm statistics) move with step one: their gradient is (old - new), see ``Task.risk``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fedtailor.data.secret import Use
from fedtailor.errors import InvalidArgument
from fedtailor.local.gradients import Gradient, Source, plain
from fedtailor.local.schedule import Rate

State = list[list[Tensor]]


@dataclass(frozen=True)
class Optimizer(ABC):
    """Hyper-parameters of local descent. ``lr`` and ``radius`` are set by the algorithm for each round.

    ``radius`` projects the parameters, after every step, on the Euclidean ball of that radius about zero.
    """

    lr: Rate = field(default=0.1, repr=False)
    weight_decay: float = 0.0
    radius: float | None = field(default=None, repr=False)

    many_rates: ClassVar[bool] = False  # True: ``lr`` may be a tensor with a step size for every client

    def __post_init__(self) -> None:
        if not 0 <= self.weight_decay < math.inf:
            raise InvalidArgument(f"weight_decay must be at least 0, not {self.weight_decay}")

    def using(self, lr: Rate, radius: float | None) -> Self:
        return replace(self, lr=lr, radius=radius)

    @property
    def privacy(self) -> Any:
        """The private optimiser that this one is (``local/private.py``); None where its gradients are plain."""
        return None

    @property
    def plain(self) -> Optimizer:
        """The optimiser without its privacy."""
        return self

    def around(self, opt: Optimizer) -> Optimizer:
        """``opt``, private where this one is."""
        return opt

    def gradient(self, source: Source, use: Use) -> Gradient:
        """Return what it steps along; ``use`` tells apart the descents that walk through the same batches."""
        return plain(source)

    def init(self, params: Sequence[Tensor]) -> State:
        """Return one list of accumulators per parameter."""
        return [[] for _ in params]

    def step_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        state: State,
        step: int,
        buffers: Sequence[bool],
        rates: Sequence[float],
        stacked: bool,
    ) -> None:
        """One step in place. ``step`` counts from 0; ``stacked`` says that leaves have a first client axis.

        ``rates`` multiplies the step size of each parameter; rate 0 is frozen. A gradient of None is zero.
        """
        lr = self.lr(step) if callable(self.lr) else self.lr
        moved = []
        for param, gradient, memory, is_buffer, rate in zip(params, grads, state, buffers, rates, strict=True):
            if not rate:
                continue
            grad = torch.zeros_like(param) if gradient is None else gradient
            if is_buffer:
                param.sub_(grad)
                continue
            if self.weight_decay:
                grad = grad.add(param, alpha=self.weight_decay)
            pace = lr.view(-1, *[1] * (param.dim() - 1)) if isinstance(lr, Tensor) and lr.dim() else lr
            self._move_(param, grad, memory, pace * rate, step)
            moved.append(param)
        if self.radius is not None:
            _project_(moved, self.radius, stacked)

    @abstractmethod
    def _move_(self, param: Tensor, grad: Tensor, memory: list[Tensor], lr: float | Tensor, step: int) -> None: ...


def _project_(params: Sequence[Tensor], radius: float, stacked: bool) -> None:
    axis = 1 if stacked else 0
    unprojected = [p.clone() for p in params] if torch.is_grad_enabled() else params  # a derivative needs them as they were
    squares = sum(p.square().flatten(axis).sum(-1) if p.dim() > axis else p.square() for p in unprojected)
    shrink = (radius / torch.as_tensor(squares).sqrt().clamp(min=radius)).clamp(max=1.0)
    for p, before in zip(params, unprojected, strict=True):
        factor = shrink.view(-1, *[1] * (p.dim() - 1)) if stacked else shrink
        p.mul_(factor) if before is p else p.copy_(before * factor)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with heavy-ball momentum, as torch's."""

    momentum: float = 0.0

    many_rates = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise InvalidArgument(f"momentum must be in [0, 1), not {self.momentum}")

    def init(self, params: Sequence[Tensor]) -> State:
        return [[torch.zeros_like(p)] if self.momentum else [] for p in params]

    def _move_(self, param: Tensor, grad: Tensor, memory: list[Tensor], lr: float | Tensor, step: int) -> None:
        if self.momentum:
            grad = memory[0].mul_(self.momentum).add_(grad)
        if isinstance(lr, Tensor):
            param.addcmul_(grad, lr, value=-1)  # rounds as the other does
        else:
            param.add_(grad, alpha=-lr)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam with bias correction (Kingma and Ba 2015, Algorithm 1); weight decay is added to the gradient, as torch's."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    many_rates = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise InvalidArgument(f"{name} must be in [0, 1), not {beta}")

    def init(self, params: Sequence[Tensor]) -> State:
        return [[torch.zeros_like(p), torch.zeros_like(p)] for p in params]

    def _move_(self, param: Tensor, grad: Tensor, memory: list[Tensor], lr: float | Tensor, step: int) -> None:
        first, second = memory
        first.mul_(self.beta1).add_(grad, alpha=1 - self.beta1)
        second.mul_(self.beta2).add_(grad * grad, alpha=1 - self.beta2)
        size = lr / (1 - self.beta1 ** (step + 1))
        root = (second / (1 - self.beta2 ** (step + 1))).sqrt_() + self.eps  # its derivative needs the square root as it is
        param.sub_(first / root * size)
