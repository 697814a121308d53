"""The only training loops: ``scan`` folds a step over a client's batches, ``descend`` minimises a risk.

One algorithm text serves both engines. On the loop engine ``data`` is a ``Batches`` and is walked batch by batch. Under
``vmap`` (vectorized engine) it is a dict of padded tensors: ``scan`` keeps the carry on padded steps, and ``descend`` on
a task's own risk steps out of vmap to run all clients' steps on stacked tensors (``local/stacked.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad as func_grad

from fedtailor import tree
from fedtailor.data.batches import Batches
from fedtailor.local.optim import Optimizer
from fedtailor.local.penalty import Penalty, add_gradient, aligned
from fedtailor.local.stacked import descend_stacked
from fedtailor.task import Task

Risk = Callable[[Any, Mapping[str, Tensor]], Tensor]
Record = dict[tuple[str, str, int], int]
_meter: ContextVar[Record | None] = ContextVar("meter", default=None)


@contextmanager
def metered(record: Record | None) -> Iterator[None]:
    """Note in ``record``, per place in the code that descends or scans, how many numbers it moves (None: note nothing)."""
    token = _meter.set(record)
    try:
        yield
    finally:
        _meter.reset(token)


def _note(kind: str, params: Any, rates: Mapping[str, float]) -> None:
    record = _meter.get()
    if record is not None:
        frame = sys._getframe(2)
        moving = [leaf for path, leaf in tree.items(params) if not tree.is_buffer(path) and rates.get(path, 1.0)]
        # numbers that stand alone (a mixing weight, a count) are not parameters of a model
        record[kind, frame.f_code.co_filename, frame.f_lineno] = sum(leaf.numel() for leaf in moving if leaf.dim())


def scan(step: Callable[[Any, Mapping[str, Any]], Any], carry: Any, data: Any) -> Any:
    """Fold ``step(carry, batch)`` over the batches; a padded step leaves the carry untouched.

    ``batch["step"]`` is the number of the step, counted from 0.
    """
    _note("scan", carry, {})
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


def descend(
    risk: Risk,
    params: Any,
    data: Any,
    opt: Optimizer,
    penalty: Penalty | None = None,
    rates: Mapping[str, float] | None = None,
) -> Any:
    """Minimise ``risk + penalty`` by ``opt``, one step per batch, from ``params``; returns new parameters.

    ``risk`` is ``task.risk``, or any function of (params, batch); ``params`` may then be any tree. ``rates`` multiplies the step
    size of single parameters; with rate 0 a parameter (or buffer) is frozen: no gradient, no decay, no momentum.
    """
    task = _own_risk(risk)
    rates, penalty = rates or {}, penalty or Penalty()
    _note("descend", params, rates)
    if isinstance(data, Batches):
        return _walk(risk, task, params, data, opt, penalty, rates)
    if task is not None:
        return descend_stacked(task, params, data, opt, penalty, rates)
    return _traced(risk, params, data, opt, penalty, rates)


def gradient_on(risk: Risk, params: Any, batch: Mapping[str, Any]) -> Any:
    """The risk's gradient on one batch; a buffer's is (old - new), see ``Task.risk``."""
    task = _own_risk(risk)
    if task is not None and task.gradient is not None:
        closed = task.gradient(params, batch)
        return {name: closed[name] for name in params}
    return func_grad(risk)(params, batch)


def count_steps(data: Any) -> Any:
    """How many real steps a client has: a number, or a tensor under vmap."""
    return data.steps if isinstance(data, Batches) else data["mask"].any(-1).sum()


def gradient(risk: Risk, params: Any, data: Any, by_rows: bool = False) -> Any:
    """Mean over the batches of the risk's gradient at ``params`` (buffers: zero).

    ``by_rows`` weighs batches by their rows: over an epoch, the gradient on all rows.
    """

    def step(carry: Any, batch: Mapping[str, Any]) -> Any:
        rows = batch["mask"].sum() if "mask" in batch else torch.tensor(float(len(batch["y"])))
        weight = rows.double() if by_rows else torch.ones((), dtype=torch.float64)
        found = tree.map(lambda leaf: leaf * weight.to(leaf), gradient_on(risk, params, batch))
        return {"sum": tree.add(carry["sum"], found), "weight": carry["weight"] + weight}

    _note("gradient", params, {})
    with metered(None):  # its scan moves nothing
        total = scan(step, {"sum": tree.zeros(params), "weight": torch.zeros((), dtype=torch.float64)}, data)
    mean = tree.map(lambda leaf: leaf / total["weight"].to(leaf), total["sum"])
    return tree.refill(params, (torch.zeros_like(g) if tree.is_buffer(path) else g for path, g in tree.items(mean)))


def _own_risk(risk: Risk) -> Task | None:
    """The task, when ``risk`` is its own: then nothing but the arguments enters the gradient."""
    owner = getattr(risk, "__self__", None)
    return owner if isinstance(owner, Task) and getattr(risk, "__func__", None) is Task.risk else None


def _kinds(params: Any, rates: Mapping[str, float]) -> tuple[list[bool], list[float]]:
    """For each leaf: is it a buffer, and its rate."""
    paths = [path for path, _ in tree.items(params)]
    return [tree.is_buffer(path) for path in paths], [rates.get(path, 1.0) for path in paths]


def _walk(
    risk: Risk, task: Task | None, params: Any, data: Batches, opt: Optimizer, penalty: Penalty, rates: Mapping[str, float]
) -> Any:
    """One client, real batches: automatic or closed-form gradient, steps in place on private copies."""
    wide = task is not None and task.channels_last
    buffers, pace = _kinds(params, rates)
    own = [_private(leaf, wide) if rate else leaf.detach() for leaf, rate in zip(tree.leaves(params), pace, strict=True)]
    model = tree.refill(params, iter(own))
    state = opt.init(own)
    center, slope = aligned(penalty.center, params), aligned(penalty.slope, params)
    closed_form = task.gradient if task is not None else None
    moving = [leaf for leaf, rate in zip(own, pace, strict=True) if rate]
    if closed_form is None:
        for leaf in moving:
            leaf.requires_grad_()
    for k, batch in enumerate(data.batches() if moving else ()):
        grads: list[Tensor | None]
        if closed_form is None:
            with torch.enable_grad():
                risk(model, batch).backward(inputs=moving)
            grads = [leaf.grad for leaf in own]  # None where frozen or not used
            for leaf in moving:
                leaf.grad = None
        else:
            closed = closed_form(model, batch)
            grads = [closed[name] if rate else None for name, rate in zip(model, pace, strict=True)]
        with torch.no_grad():
            grads = add_gradient(grads, own, buffers, pace, penalty.pull, center, slope)
            opt.step_(own, grads, state, k, buffers, pace, stacked=False)
        del grads  # freed before the next backward pass, which reuses the memory
    return tree.map(lambda leaf: leaf.detach().contiguous(), model)


def _private(leaf: Tensor, channels_last: bool) -> Tensor:
    wide = channels_last and leaf.dim() == 4
    return leaf.detach().clone(memory_format=torch.channels_last if wide else torch.contiguous_format)


def _traced(
    risk: Risk, params: Any, data: Mapping[str, Tensor], opt: Optimizer, penalty: Penalty, rates: Mapping[str, float]
) -> Any:
    """Any risk under vmap: differentiate what was traced, keep the carry on padded steps."""
    buffers, pace = _kinds(params, rates)
    center, slope = aligned(penalty.center, params), aligned(penalty.slope, params)
    names = [name for name in ("x", "y", "mask", "key") if name in data]
    state: Any = None
    for k in range(data["mask"].shape[0]):
        batch = {name: data[name][k] for name in names}
        old = tree.leaves(params)
        found = tree.leaves(func_grad(risk)(params, batch))
        new = [torch.zeros_like(g) + p for g, p in zip(found, old, strict=True)]  # as widely batched as the gradient
        grads = add_gradient(found, old, buffers, pace, penalty.pull, center, slope)
        if state is None:
            state = opt.init(new)
        before = [[m.clone() for m in memory] for memory in state]
        opt.step_(new, grads, state, k, buffers, pace, stacked=False)
        real = batch["mask"].any()
        params = tree.refill(params, (torch.where(real, n, o) for n, o in zip(new, old, strict=True)))
        state = [[torch.where(real, m, b) for m, b in zip(ms, bs, strict=True)] for ms, bs in zip(state, before, strict=True)]
    return params
