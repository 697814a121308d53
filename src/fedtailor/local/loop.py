"""The only training loops: ``scan`` folds a step over a client's batches, ``descend`` minimises a risk.

One algorithm text serves both engines. On the loop engine ``data`` is a ``Batches`` and is walked batch by batch. Under
``vmap`` (vectorized engine) it is a dict of padded tensors: ``scan`` keeps the carry on padded steps, and ``descend`` on
a task's own risk steps out of vmap (an ``autograd.Function`` with a vmap rule) to run all clients' steps on stacked
tensors, in place, with the closed-form gradient where the task has one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad as func_grad
from torch.func import vmap

from fedtailor import tree
from fedtailor.data.batches import Batches
from fedtailor.local.optim import Optimizer
from fedtailor.local.penalty import Penalty, add_gradient
from fedtailor.task import Task

Risk = Callable[[Any, Mapping[str, Tensor]], Tensor]
_meter: ContextVar[dict[tuple[str, int], int] | None] = ContextVar("meter", default=None)


@contextmanager
def trained_parameters() -> Iterator[dict[tuple[str, int], int]]:
    """Record, per place in the code that descends, how many numbers it trains."""
    record: dict[tuple[str, int], int] = {}
    token = _meter.set(record)
    try:
        yield record
    finally:
        _meter.reset(token)


def _note(params: Any) -> None:
    record = _meter.get()
    if record is not None:
        frame = sys._getframe(2)
        total = sum(leaf.numel() for path, leaf in tree.items(params) if not tree.is_buffer(path))
        record[frame.f_code.co_filename, frame.f_lineno] = total


def scan(step: Callable[[Any, Mapping[str, Any]], Any], carry: Any, data: Any) -> Any:
    """Fold ``step(carry, batch)`` over the batches; a padded step leaves the carry untouched.

    ``batch["step"]`` is the number of the step, counted from 0.
    """
    if isinstance(data, Batches):
        for s, batch in enumerate(data.batches()):
            carry = step(carry, {**batch, "step": s})
        return carry
    for s in range(data["mask"].shape[0]):
        batch = {name: data[name][s] for name in ("x", "y", "mask", "key") if name in data}
        carry = tree.where(batch["mask"].any(), step(carry, {**batch, "step": s}), carry)
    return carry


def repeat(batch: Mapping[str, Any], steps: int) -> Any:
    """One batch as data for ``steps`` steps (no copy)."""
    keys = batch["key"] + torch.arange(steps)
    if "mask" not in batch:  # loop engine: a real batch
        index = np.broadcast_to(np.arange(len(batch["y"])), (steps, len(batch["y"])))
        return Batches(batch["x"], batch["y"], index, keys.numpy())
    wide = {name: batch[name].unsqueeze(0).expand(steps, *batch[name].shape) for name in ("x", "y", "mask")}
    return {**wide, "key": keys}


def descend(risk: Risk, params: Any, data: Any, opt: Optimizer, penalty: Penalty | None = None) -> Any:
    """Minimise ``risk + penalty`` by ``opt``, one step per batch, from ``params``; returns new parameters.

    ``risk`` is ``task.risk``, or any function of (params, batch); ``params`` may then be any tree.
    """
    _note(params)
    task = _own_risk(risk)
    if isinstance(data, Batches):
        return _walk(risk, task, params, data, opt, penalty or Penalty())
    if task is not None:
        return _stacked(task, params, data, opt, penalty or Penalty())
    return _traced(risk, params, data, opt, penalty or Penalty())


def _own_risk(risk: Risk) -> Task | None:
    """The task, when ``risk`` is its own: then nothing but the arguments enters the gradient."""
    owner = getattr(risk, "__self__", None)
    return owner if isinstance(owner, Task) and getattr(risk, "__func__", None) is Task.risk else None


def _buffers(params: Any) -> list[bool]:
    return [tree.is_buffer(path) for path, _ in tree.items(params)]


def _leaves(branch: Any) -> list[Tensor] | None:
    return None if branch is None else tree.leaves(branch)


def _walk(risk: Risk, task: Task | None, params: Any, data: Batches, opt: Optimizer, penalty: Penalty) -> Any:
    """One client, real batches: automatic or closed-form gradient, steps in place on private copies."""
    wide = task is not None and task.channels_last
    own = [_private(leaf, wide) for leaf in tree.leaves(params)]
    model = tree.refill(params, iter(own))
    buffers, state = _buffers(params), opt.init(own)
    center, slope = _leaves(penalty.center), _leaves(penalty.slope)
    gradient = task.gradient if task is not None else None
    if gradient is None:
        for leaf in own:
            leaf.requires_grad_()
    for k, batch in enumerate(data.batches()):
        if gradient is None:
            with torch.enable_grad():
                risk(model, batch).backward(inputs=own)
            grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in own]
            for leaf in own:
                leaf.grad = None
        else:
            closed = gradient(model, batch)
            grads = [closed[name] for name in model]
        with torch.no_grad():
            grads = add_gradient(grads, own, buffers, penalty.pull, center, slope)
            opt.step_(own, grads, state, k, buffers, stacked=False)
        del grads  # freed before the next backward pass, which reuses the memory
    return tree.map(lambda leaf: leaf.detach().contiguous(), model)


def _private(leaf: Tensor, channels_last: bool) -> Tensor:
    wide = channels_last and leaf.dim() == 4
    return leaf.detach().clone(memory_format=torch.channels_last if wide else torch.contiguous_format)


def _traced(risk: Risk, params: Any, data: Mapping[str, Tensor], opt: Optimizer, penalty: Penalty) -> Any:
    """Any risk under vmap: differentiate what was traced, keep the carry on padded steps."""
    buffers = _buffers(params)
    center, slope = _leaves(penalty.center), _leaves(penalty.slope)
    names = [name for name in ("x", "y", "mask", "key") if name in data]
    state: Any = None
    for k in range(data["mask"].shape[0]):
        batch = {name: data[name][k] for name in names}
        old = tree.leaves(params)
        grads = add_gradient(tree.leaves(func_grad(risk)(params, batch)), old, buffers, penalty.pull, center, slope)
        new = [torch.zeros_like(g) + p for g, p in zip(grads, old, strict=True)]  # as widely batched as the gradient
        if state is None:
            state = opt.init(new)
        before = [[m.clone() for m in memory] for memory in state]
        opt.step_(new, grads, state, k, buffers, stacked=False)
        real = batch["mask"].any()
        params = tree.refill(params, (torch.where(real, n, o) for n, o in zip(new, old, strict=True)))
        state = [[torch.where(real, m, b) for m, b in zip(ms, bs, strict=True)] for ms, bs in zip(state, before, strict=True)]
    return params


@dataclass(frozen=True, eq=False)
class _Call:
    """Everything about a descent that is not a tensor; the tensors follow in the order of ``split``."""

    task: Task
    opt: Optimizer
    names: tuple[str, ...]
    batch: tuple[str, ...]
    pull: float | None
    has_center: bool
    has_slope: bool

    def split(self, tensors: tuple[Tensor, ...]) -> tuple[list[Tensor], dict[str, Tensor], Any, Any, Any]:
        queue = list(tensors)

        def take(count: int) -> list[Tensor]:
            head = queue[:count]
            del queue[:count]
            return head

        params = take(len(self.names))
        data = dict(zip(self.batch, take(len(self.batch)), strict=True))
        pull = self.pull if self.pull is not None else take(1)[0]
        center = take(len(self.names)) if self.has_center else None
        slope = take(len(self.names)) if self.has_slope else None
        return params, data, pull, center, slope


def _stacked(task: Task, params: Any, data: Mapping[str, Tensor], opt: Optimizer, penalty: Penalty) -> Any:
    batch = tuple(name for name in ("x", "y", "mask", "key") if name in data)
    pull = None if isinstance(penalty.pull, Tensor) else float(penalty.pull)
    call = _Call(task, opt, tuple(params), batch, pull, penalty.center is not None, penalty.slope is not None)
    tensors = [*params.values(), *(data[name] for name in batch)]
    if pull is None:
        tensors.append(penalty.pull)
    for branch in (penalty.center, penalty.slope):
        if branch is not None:
            tensors += [branch[name] for name in params]
    return dict(zip(call.names, _Descend.apply(call, *tensors), strict=True))


class _Descend(torch.autograd.Function):
    """A descent as one operation: outside vmap for one client, inside vmap for all clients of a chunk at once."""

    generate_vmap_rule = False

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        params, data, pull, center, slope = call.split(tensors)
        one = [p.unsqueeze(0) for p in params]
        data = {name: value.unsqueeze(1) for name, value in data.items()}
        wide = [None if branch is None else [t.unsqueeze(0) for t in branch] for branch in (center, slope)]
        return tuple(p.squeeze(0) for p in _run_stacked(call, one, data, pull, wide[0], wide[1]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _Call, *tensors: Tensor) -> Any:
        dims = in_dims[1:]
        wide = [
            t.unsqueeze(0).expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(tensors, dims, strict=True)
        ]
        params, data, pull, center, slope = call.split(tuple(wide))
        data = {name: value.movedim(0, 1) for name, value in data.items()}  # [steps, clients, ...]
        out = _run_stacked(call, params, data, pull, center, slope)
        return tuple(out), (0,) * len(out)


def _run_stacked(
    call: _Call,
    params: list[Tensor],
    data: dict[str, Tensor],
    pull: Any,
    center: list[Tensor] | None,
    slope: list[Tensor] | None,
) -> list[Tensor]:
    """All clients at once: leaves [clients, ...], data [steps, clients, batch, ...].

    A step takes the clients that still have work. Where they come with most work first (the engine sorts them) these are
    a prefix, and the arithmetic is on views; otherwise they are sorted here.
    """
    counts = (data["mask"] > 0).sum(-1)  # rows of each client in each step: [steps, clients]
    per_client = (counts > 0).sum(0)
    if bool((per_client[1:] > per_client[:-1]).any()):
        order = per_client.argsort(descending=True, stable=True)
        back = order.argsort()
        pulls = pull[order] if isinstance(pull, Tensor) and pull.dim() else pull
        inputs = [p[order] for p in params], {k: v[:, order] for k, v in data.items()}, pulls
        branches = [None if b is None else [t[order] for t in b] for b in (center, slope)]
        return [p[back] for p in _run_stacked(call, *inputs, branches[0], branches[1])]
    own = [p.detach().clone(memory_format=torch.contiguous_format) for p in params]
    state = call.opt.init(own)
    buffers = [tree.is_buffer(name) for name in call.names]
    busy = (counts > 0).sum(1).tolist()
    most = counts.amax(1).tolist()
    least = counts.masked_fill(counts == 0, data["mask"].shape[-1]).amin(1).tolist()
    for k, active in enumerate(busy):
        if active == 0:
            break
        width = most[k]
        batch = {name: value[k, :active] for name, value in data.items()}
        if width < data["mask"].shape[-1]:
            batch.update({name: batch[name][:, :width] for name in ("x", "y", "mask")})
        if least[k] == width:
            del batch["mask"]  # every row is real
        views = own if active == len(own[0]) else [p[:active] for p in own]
        memory = state if views is own else [[m[:active] for m in ms] for ms in state]
        grads = _gradient(call, views, batch)
        cut = [b if b is None or views is own else [t[:active] for t in b] for b in (center, slope)]
        tug = pull[:active] if isinstance(pull, Tensor) and pull.dim() else pull
        grads = add_gradient(grads, views, buffers, tug, cut[0], cut[1])
        call.opt.step_(views, grads, memory, k, buffers, stacked=True)
    return own


def _gradient(call: _Call, params: list[Tensor], batch: dict[str, Tensor]) -> list[Tensor]:
    """Per-client gradients. The gradient of the sum of the clients' risks, in stacked parameters, is all of them."""
    if call.task.gradient is not None:
        closed = call.task.gradient(dict(zip(call.names, params, strict=True)), batch)
        return [closed[name] for name in call.names]
    leaves = [p.detach().requires_grad_() for p in params]
    with torch.enable_grad():
        losses = vmap(call.task.risk, randomness="different")(dict(zip(call.names, leaves, strict=True)), batch)
        return list(torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True))
