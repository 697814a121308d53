"""An optimiser of ``torch.optim``, or one of the user's own in its form, as a pure optimiser of ours.

Its memory is kept by us and given to it in every step, so that it follows clients, engines and checkpoints like any other. It
must work number by number, with a memory of the parameter's shape: many clients' parameters lie stacked in one tensor. What does
not (LBFGS, Adafactor, Muon, NAdam, ASGD) is refused, by trying it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from fedtailor.errors import FedtailorError, InvalidArgument
from fedtailor.local.gradients import is_followed
from fedtailor.local.optim import Optimizer, State
from fedtailor.local.schedule import Rate

COUNT = "step"  # the memory that counts steps, which we do ourselves
_known: dict[tuple[type[Any], str], tuple[str, ...]] = {}  # the names of the memories of those that were tried


@dataclass(frozen=True, repr=False, init=False)
class TorchOptimizer(Optimizer):
    """``optimizer`` is a class, or the name of one in ``torch.optim``; ``options`` are what it takes beside the step size.

    Weight decay is the optimiser's own, among the options.
    """

    optimizer: Any = "SGD"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        optimizer: Any = "SGD",
        options: Mapping[str, Any] | None = None,
        *,
        lr: Rate = 0.1,
        weight_decay: float = 0.0,
        radius: float | None = None,
    ) -> None:
        fields = {"optimizer": optimizer, "options": options or {}, "lr": lr, "weight_decay": weight_decay, "radius": radius}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay:
            raise InvalidArgument("TorchOptimizer: give weight_decay among the options, as options={'weight_decay': 0.1}")
        if isinstance(self.optimizer, str):
            named = getattr(torch.optim, self.optimizer, None)
            if named is None:
                raise InvalidArgument(
                    f"TorchOptimizer: torch.optim has no {self.optimizer!r}; give a class, or mine.py:MyOptimizer"
                )
            object.__setattr__(self, "optimizer", named)
        if not isinstance(self.optimizer, type) or not issubclass(self.optimizer, torch.optim.Optimizer):
            raise InvalidArgument(f"TorchOptimizer: {self.optimizer!r} is no torch.optim.Optimizer; give a class")
        if "lr" in self.options:
            raise InvalidArgument("TorchOptimizer: give lr to the method, for instance ft.FedAvg(lr=0.5), not among the options")
        plain = {name: tuple(value) if isinstance(value, list) else value for name, value in self.options.items()}
        object.__setattr__(self, "options", plain)
        key = self.optimizer, repr(sorted(plain.items()))
        if key not in _known:
            _known[key] = _try(self.optimizer, plain)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"TorchOptimizer({self.optimizer.__name__}{options})"

    @property
    def _memories(self) -> tuple[str, ...]:
        return _known[self.optimizer, repr(sorted(self.options.items()))]

    def init(self, params: Sequence[Tensor]) -> State:
        return [[torch.zeros_like(p) for _ in self._memories] for p in params]

    def _move_(self, param: Tensor, grad: Tensor, memory: list[Tensor], lr: float | Tensor, step: int) -> None:
        if is_followed({"param": param, "grad": grad}):
            raise InvalidArgument(f"{self!r} cannot be differentiated through; use ft.SGD or ft.Adam there")
        if any(_functorch.is_batchedtensor(t) for t in (param, grad, *memory)):
            new = _Step.apply(self, lr, step, param, grad, *memory)
            for old, value in zip((param, *memory), new, strict=True):
                old.copy_(value)
            return
        own = param.detach()  # the same numbers, which it changes in place
        optimizer = self.optimizer([own], lr=lr, **self.options)
        known = dict(zip(self._memories, memory, strict=True))
        if step:
            optimizer.state[own] = {COUNT: torch.tensor(float(step)), **known}
        own.grad = grad.detach()
        optimizer.step()
        for name, value in known.items():
            if (new := optimizer.state[own][name]) is not value:
                value.copy_(new)


class _Step(torch.autograd.Function):
    """A step as one operation to ``vmap``: it works number by number, so clients may lie side by side."""

    generate_vmap_rule = False

    @staticmethod
    def forward(
        opt: TorchOptimizer, lr: float | Tensor, step: int, param: Tensor, grad: Tensor, *memory: Tensor
    ) -> tuple[Tensor, ...]:
        own, moments = param.detach().clone(), [m.detach().clone() for m in memory]
        opt._move_(own, grad, moments, lr, step)
        return own, *moments

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], opt: TorchOptimizer, lr: float, step: int, *tensors: Tensor) -> Any:
        wide = [
            t.unsqueeze(0).expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(tensors, in_dims[3:], strict=True)
        ]
        out = _Step.apply(opt, lr, step, *wide)
        return out, (0,) * len(out)


def _try(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of an optimiser's memory; refuse one that fails, or does not work number by number."""
    draw = torch.Generator().manual_seed(0)
    start, grads = torch.randn(2, 3, generator=draw), torch.randn(3, 2, 3, generator=draw)
    ends = []
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for shape in ((2, 3), (6,), (1, 2, 3)):
                param = start.clone().view(shape)
                optimizer = kind([param], lr=0.1, **options)  # type: ignore[call-arg]
                for grad in grads:
                    param.grad = grad.view(shape)
                    optimizer.step()
                ends.append((param.view(2, 3), {name: value for name, value in optimizer.state[param].items() if name != COUNT}))
    except FedtailorError:
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidArgument(
            f"TorchOptimizer: {kind.__name__} cannot be used here ({text}); use another, or write one"
        ) from error
    (first, memory), *others = ends
    for name, value in memory.items():
        if value is not None and (not isinstance(value, Tensor) or tuple(value.shape) != (2, 3)):
            raise InvalidArgument(
                f"TorchOptimizer: {kind.__name__} remembers {name!r}, which is not of the parameter's shape, so that clients "
                "cannot be stacked; use another, or write one (docs/own.md)"
            )
    if not all(torch.allclose(first, other, rtol=1e-5, atol=1e-6) for other, _ in others):
        raise InvalidArgument(
            f"TorchOptimizer: {kind.__name__} does not work number by number, so that clients cannot be stacked; use another"
        )
    return tuple(name for name, value in memory.items() if value is not None)
