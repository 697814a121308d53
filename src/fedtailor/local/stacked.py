"""A descent of all clients of a chunk at once: leaves [clients, ...], data [steps, clients, batch, ...].

``_Descend`` is one operation to ``vmap``: its rule is given the stacked tensors and runs the steps on them in place, with the
task's closed-form gradient or one backward pass through a vmapped forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedtailor import tree
from fedtailor.local.optim import Optimizer
from fedtailor.local.penalty import Penalty, add_gradient, aligned
from fedtailor.local.private import Private, private_gradient
from fedtailor.task import Task

Branch = list[Tensor | None] | None


@dataclass(frozen=True, eq=False)
class _Call:
    """Everything about a descent that is not a tensor; the tensors follow in the order of ``split``."""

    task: Task
    opt: Optimizer
    names: tuple[str, ...]
    rates: tuple[float, ...]
    batch: tuple[str, ...]
    pull: float | None  # None: a tensor, one number per client
    center: tuple[bool, ...] | None  # which parameters have one
    slope: tuple[bool, ...] | None
    use: int  # of how many descents on these batches, where they are private

    def split(self, tensors: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor], Any, Branch, Branch]:
        queue = iter(tensors)
        params = list(islice(queue, len(self.names)))
        data = {name: next(queue) for name in self.batch}
        pull = self.pull if self.pull is not None else next(queue)
        return params, data, pull, _refill(self.center, queue), _refill(self.slope, queue)


def _refill(present: tuple[bool, ...] | None, queue: Iterator[Tensor]) -> Branch:
    return None if present is None else [next(queue) if there else None for there in present]


def descend_stacked(
    task: Task,
    params: Any,
    data: Mapping[str, Tensor],
    opt: Optimizer,
    penalty: Penalty,
    rates: Mapping[str, float],
    use: int = 0,
) -> Any:
    """``descend`` on a task's own risk, for data given as tensors."""
    names = tuple(params)
    center, slope = aligned(penalty.center, params), aligned(penalty.slope, params)
    call = _Call(
        task,
        opt,
        names,
        tuple(rates.get(name, 1.0) for name in names),
        tuple(name for name in ("x", "y", "mask", "key", "expected") if name in data),
        None if isinstance(penalty.pull, Tensor) else float(penalty.pull),
        None if center is None else tuple(c is not None for c in center),
        None if slope is None else tuple(s is not None for s in slope),
        use,
    )
    tensors = [*params.values(), *(data[name] for name in call.batch)]
    if isinstance(penalty.pull, Tensor):
        tensors.append(penalty.pull)
    tensors += [t for branch in (center, slope) if branch is not None for t in branch if t is not None]
    return dict(zip(names, _Descend.apply(call, *tensors), strict=True))


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


def _run(call: _Call, tensors: list[Tensor]) -> list[Tensor]:
    """The steps. Each takes the clients that still have work: a prefix where they come with most work first, as the engine
    sorts them, and then the arithmetic is on views."""
    params, data, pull, center, slope = call.split(tensors)
    data = {name: value.movedim(0, 1) for name, value in data.items()}  # [steps, clients, ...]
    own = [p.detach().clone(memory_format=torch.contiguous_format) if r else p for p, r in zip(params, call.rates, strict=True)]
    state = call.opt.init(own)
    buffers = [tree.is_buffer(name) for name in call.names]
    for k, (who, batch) in enumerate(_steps(data)):
        everyone = isinstance(who, slice) and who.stop == len(own[0])
        views = own if everyone else [p[who] for p in own]
        memory = state if everyone else [[m[who] for m in ms] for ms in state]
        cut = [b if b is None or everyone else [None if t is None else t[who] for t in b] for b in (center, slope)]
        tug = pull[who] if isinstance(pull, Tensor) and pull.dim() else pull
        grads = add_gradient(_gradient(call, views, batch), views, buffers, call.rates, tug, cut[0], cut[1])
        call.opt.step_(views, grads, memory, k, buffers, call.rates, stacked=True)
        if not isinstance(who, slice):  # copies, not views
            for place, new in zip(own, views, strict=True):
                place[who] = new
            for places, news in zip(state, memory, strict=True):
                for place, new in zip(places, news, strict=True):
                    place[who] = new
    return own


def _steps(data: dict[str, Tensor]) -> Iterator[tuple[Any, dict[str, Tensor]]]:
    """(which clients, their batch) of every step in which somebody has a row; the mask is left out where all rows are real.

    With Poisson samples a step may be real and have no row.
    """
    real = data["mask"] > 0  # [steps, clients, batch]
    counts = real.sum(-1)
    busy = data["expected"] > 0 if "expected" in data else counts > 0
    last = (real * torch.arange(1, real.shape[-1] + 1)).amax(-1) if real.shape[-1] else counts  # one past the last real row
    prefix = bool((busy[:, 1:] <= busy[:, :-1]).all())
    active, width = busy.sum(1).tolist(), last.amax(1).tolist() if len(last) else []
    least = counts.masked_fill(~busy, real.shape[-1]).amin(1).tolist() if len(counts) else []
    for k, (size, rows) in enumerate(zip(active, width, strict=True)):
        if not size:
            continue
        who: Any = slice(0, size) if prefix else busy[k].nonzero()[:, 0]
        batch = {name: value[k][who] for name, value in data.items()}
        if rows < real.shape[-1]:
            batch.update({name: batch[name][:, :rows] for name in ("x", "y", "mask")})
        if least[k] == rows:
            del batch["mask"]
        yield who, batch


def _gradient(call: _Call, params: list[Tensor], batch: dict[str, Tensor]) -> list[Tensor | None]:
    """Per-client gradients. The gradient of the sum of the clients' risks, in stacked parameters, is all of them."""
    if isinstance(call.opt, Private):
        moves = [bool(rate) and not tree.is_buffer(name) for name, rate in zip(call.names, call.rates, strict=True)]
        model = dict(zip(call.names, params, strict=True))
        return private_gradient(call.opt, call.task.risk, call.task, model, batch, moves, call.use, stacked=True)
    if call.task.gradient is not None:
        closed = call.task.gradient(dict(zip(call.names, params, strict=True)), batch)
        return [closed[name] if rate else None for name, rate in zip(call.names, call.rates, strict=True)]
    leaves = [p.detach().requires_grad_(bool(rate)) for p, rate in zip(params, call.rates, strict=True)]
    moving = [leaf for leaf in leaves if leaf.requires_grad]
    if not moving:
        return [None] * len(leaves)
    with torch.enable_grad():
        losses = vmap(call.task.risk, randomness="different")(dict(zip(call.names, leaves, strict=True)), batch)
        found = iter(torch.autograd.grad(losses.sum(), moving, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]
