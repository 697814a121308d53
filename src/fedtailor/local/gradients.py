"""Where a descent's gradient comes from: a task's closed form, the tape, or what ``vmap`` traces; ``Private`` clips rows instead.

A ``Gradient`` is a function of (leaves, batch) with a tensor, or None for zero, in the place of every leaf. An optimiser makes
one from a ``Source`` (``Optimizer.gradient``), which is how privacy is a transform of the gradient and of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch.func import grad as func_grad
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedtailor import tree
from fedtailor.task import Task
from fedtailor.task.dense import DenseForms
from fedtailor.task.question import Question

Risk = Callable[[Any, Mapping[str, Tensor]], Tensor]
Gradient = Callable[[list[Tensor], Mapping[str, Tensor]], list[Tensor | None]]


@dataclass(frozen=True, eq=False)
class Source:
    """A risk and the parameters it is a function of.

    ``task`` is set where the risk is that task's own; ``stacked`` says that leaves and batches have a first client axis, and
    ``traced`` that they may belong to ``vmap``, where nothing can be recorded on the tape.
    """

    risk: Risk
    task: Task | None
    like: Any
    rates: Mapping[str, float]
    stacked: bool = False
    traced: bool = False

    @cached_property
    def buffers(self) -> list[bool]:
        """Whether each leaf is a buffer."""
        return [tree.is_buffer(path) for path, _ in tree.items(self.like)]

    @cached_property
    def paces(self) -> list[float]:
        """The rate of each leaf."""
        return [self.rates.get(path, 1.0) for path, _ in tree.items(self.like)]

    def params(self, leaves: list[Tensor]) -> Any:
        return tree.refill(self.like, iter(leaves))

    def spread(self, moving: Any) -> list[Tensor | None]:
        """Return the gradients of the leaves that move in their places among all leaves, None for the others."""
        queue = iter(moving)
        return [next(queue) if pace else None for pace in self.paces]


def plain(source: Source) -> Gradient:
    """Return the plain gradient of the risk as a function; a buffer's is (old - new), see ``Task.risk``."""
    if source.task is not None and source.task.gradient is not None:
        return _closed_form(source, source.task.gradient)
    if source.stacked and source.task is not None and source.task.layered is not None:
        return _by_layers(source, source.task.layered)
    return _traced(source) if source.traced else _taped(source)


def _by_layers(source: Source, forms: DenseForms) -> Gradient:
    taped, by_layers = _taped(source), _closed_form(source, forms.gradient)

    def gradient(leaves: list[Tensor], batch: Mapping[str, Tensor]) -> list[Tensor | None]:
        return (by_layers if forms.takes(batch) else taped)(leaves, batch)

    return gradient


def _closed_form(source: Source, formula: Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Gradient:
    names = [name if pace else None for name, pace in zip(source.like, source.paces, strict=True)]

    def gradient(leaves: list[Tensor], batch: Mapping[str, Tensor]) -> list[Tensor | None]:
        closed = formula(dict(zip(source.like, leaves, strict=True)), batch)
        return [None if name is None else closed[name] for name in names]

    return gradient


def _taped(source: Source) -> Gradient:
    """Use one backward pass: in stacked parameters, the gradient of the sum of the clients' risks holds each client's."""
    risk = vmap(source.risk, randomness="error") if source.stacked else source.risk
    prepared: list[Tensor] | None = None
    moving: list[Tensor] = []
    model: Any = None

    def gradient(leaves: list[Tensor], batch: Mapping[str, Tensor]) -> list[Tensor | None]:
        nonlocal prepared, moving, model
        if leaves is not prepared:  # a list that is stepped on in place is prepared once
            free = [leaf.detach().requires_grad_(bool(pace)) for leaf, pace in zip(leaves, source.paces, strict=True)]
            prepared, model, moving = leaves, source.params(free), [leaf for leaf in free if leaf.requires_grad]
        with torch.enable_grad():
            value = risk(model, batch)
            return source.spread(torch.autograd.grad(value.sum() if source.stacked else value, moving, allow_unused=True))

    return gradient


def _traced(source: Source) -> Gradient:
    """Differentiate with ``torch.func``, in the leaves that move."""

    def gradient(leaves: list[Tensor], batch: Mapping[str, Tensor]) -> list[Tensor | None]:
        def value(moving: list[Tensor]) -> Tensor:
            queue = iter(moving)
            return source.risk(
                source.params([next(queue) if pace else leaf for leaf, pace in zip(leaves, source.paces, strict=True)]), batch
            )

        with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernels of attention have no second derivative
            return source.spread(func_grad(value)([leaf for leaf, pace in zip(leaves, source.paces, strict=True) if pace]))

    return gradient


class Asked(NamedTuple):
    """What a risk turned out to be: the own risk of ``task`` (or None); ``detour``: a task's risk and something more;
    ``followed``: a function of tensors, beside its arguments, in which somebody differentiates."""

    task: Task | None
    detour: bool = False
    followed: bool = False


def task_of(risk: Risk, params: Any, batch: Callable[[], Mapping[str, Tensor] | None]) -> Asked:
    """Return whose own risk ``risk`` is, if any task's.

    A function around ``task.risk`` is called once to find out, with a ``Question`` in the place of a batch.
    """
    owner = getattr(risk, "__self__", None)
    if isinstance(owner, Task) and getattr(risk, "__func__", None) is Task.risk:
        return Asked(owner)
    first = batch()
    if first is None:
        return Asked(None)
    question = Question(first, params)
    try:
        value = risk(params, question)
    except Exception:  # it does more with the risk than pass it on; if it is wrong, its descent will say so
        return Asked(None, question.task is not None, is_followed(*question.others))
    if value is question.reply:
        return Asked(question.task)
    return Asked(None, question.task is not None, is_followed(value, *question.others))


def is_followed(*trees: Any) -> bool:
    """Whether somebody differentiates in a leaf of these trees, on the tape or with ``torch.func``."""
    return torch.is_grad_enabled() and any(_tracked(leaf) for one in trees for leaf in tree.leaves(one))


def inside_transform() -> bool:
    """Whether this is called inside a function that ``torch.func`` transforms, where nothing can be put on the tape."""
    return _functorch.maybe_current_level() is not None


def _tracked(leaf: Any) -> bool:
    while isinstance(leaf, Tensor):
        if leaf.requires_grad:
            return True
        if not _functorch.is_batchedtensor(leaf):
            return False
        leaf = _functorch.get_unwrapped(leaf)  # vmap inside a derivative: its wrapper hides it
    return False
