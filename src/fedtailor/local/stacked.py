"""A descent on a task's own risk as one operation to ``vmap``: its rule is given the tensors of all clients of a chunk, stacked,
and takes the steps on them in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.data.secret import NO_USE, Use
from fedtailor.local.descent import LEAVES, Descent, Point, Stacked, copied, take_steps
from fedtailor.local.gradients import Source
from fedtailor.local.optim import Optimizer
from fedtailor.local.penalty import Penalty
from fedtailor.task import Task
from fedtailor.task.linear import laid_out


@dataclass(frozen=True, eq=False)
class _Call:
    """Everything about a descent that is not a tensor; the tensors are the leaves of ``like``, in its order."""

    task: Task
    opt: Optimizer
    rates: Mapping[str, float]
    use: Use
    pull: float  # 0 where every client has its own, among the tensors (the step size may be there too)
    like: Mapping[str, Any]


def descend_stacked(
    task: Task,
    params: Any,
    data: Mapping[str, Tensor],
    opt: Optimizer,
    penalty: Penalty,
    rates: Mapping[str, float],
    use: Use = NO_USE,
) -> Any:
    """Run ``descend`` on a task's own risk, for data in tensors."""
    tensors: dict[str, Any] = {"params": params, "data": {name: data[name] for name in LEAVES if name in data}}
    for name, branch in (("center", penalty.center), ("slope", penalty.slope)):
        if branch is not None:
            tensors[name] = {key: branch[key] for key in params if branch.get(key) is not None}
    if any(isinstance(rate, Tensor) for rate in rates.values()):
        raise TypeError("the rates of a descent must be numbers; vary the step size instead")
    pull = penalty.pull
    if isinstance(pull, Tensor):
        tensors["pull"], pull = pull, 0.0
    if isinstance(opt.lr, Tensor):
        tensors["lr"], opt = opt.lr, opt.using(0.0, opt.radius)
    call = _Call(task, opt, rates, use, float(pull), tensors)
    return dict(zip(params, _Descend.apply(call, *tree.leaves(tensors)), strict=True))


class _Descend(torch.autograd.Function):
    """Outside vmap for one client, inside vmap for all clients of a chunk."""

    generate_vmap_rule = False

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(p.squeeze(0) for p in _run(call, [t.unsqueeze(0) for t in tensors]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Tensor) -> Any:
        wide = [
            t.unsqueeze(0).expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(tensors, in_dims[1:], strict=True)
        ]
        out = _run(call, wide)
        return tuple(out), (0,) * len(out)


def _copied(leaf: Tensor, layered: bool) -> Tensor:
    """Return a copy of a leaf that steps can change in place, laid out for products."""
    return copied(leaf.mT).mT if layered and leaf.dim() == 3 else copied(leaf)


def _run(call: _Call, tensors: list[Tensor]) -> list[Tensor]:
    """Take the steps and return the parameters after them."""
    wide = tree.refill(call.like, iter(tensors))
    layered = call.task.gradient is not None or call.task.layered is not None
    if layered:  # all matrices in one layout, in which products and steps are fast
        wide |= {part: tree.map(laid_out, wide[part]) for part in ("center", "slope") if part in wide}
    own = {name: _copied(leaf, layered) if call.rates.get(name, 1.0) else leaf for name, leaf in wide["params"].items()}
    penalty = Penalty(wide.get("pull", call.pull), wide.get("center"), wide.get("slope"))
    opt = call.opt.using(wide["lr"], call.opt.radius) if "lr" in wide else call.opt
    source = Source(call.task.risk, call.task, own, call.rates, stacked=True)
    point = Point(own, list(own.values()))
    take_steps([Descent(source, point, opt, penalty, call.use)], Stacked(wide["data"]))
    return [leaf.contiguous() for leaf in point.leaves]
