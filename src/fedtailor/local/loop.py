"""The only training loops: ``scan`` folds a step over a client's batches, ``descend`` minimises a risk, ``alternate`` several
in turn.

One algorithm text serves both engines. On the loop engine ``data`` is a ``Batches`` and is walked batch by batch. Under
``vmap`` (vectorized engine) it is a dict of padded tensors: ``scan`` keeps the carry on padded steps, and ``descend`` on
a task's own risk steps out of vmap to run all clients' steps on stacked tensors (``local/stacked.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad as func_grad

from fedtailor import tree
from fedtailor.data.batches import Batches
from fedtailor.data.guard import Guarded
from fedtailor.errors import InvalidArgument
from fedtailor.local.optim import Optimizer
from fedtailor.local.penalty import Penalty, add_gradient, aligned
from fedtailor.local.private import Private, private_gradient
from fedtailor.local.stacked import descend_stacked
from fedtailor.task import Task

Risk = Callable[[Any, Mapping[str, Tensor]], Tensor]
Record = dict[tuple[str, str, int], int]
LEAVES = ("x", "y", "mask", "key", "expected")  # of a batch
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
    if isinstance(data, Guarded):
        return _scan_guarded(step, carry, data)
    if isinstance(data, Batches):
        for s, batch in enumerate(data.batches()):
            carry = step(carry, {**batch, "step": s})
        return carry
    for s in range(data["mask"].shape[0]):
        batch = {name: data[name][s] for name in LEAVES if name in data}
        carry = tree.where(_real(batch), step(carry, {**batch, "step": s}), carry)
    return carry


def _scan_guarded(step: Callable[[Any, Mapping[str, Any]], Any], carry: Any, data: Guarded) -> Any:
    """Every batch is guarded as the data are; uses are counted for each batch by itself."""
    before = data.uses.get(data.phase, 0)
    most = before

    def watched(carry: Any, batch: Mapping[str, Any]) -> Any:
        nonlocal most
        data.uses[data.phase] = before
        carry = step(carry, data.batch(batch))
        most = max(most, data.uses[data.phase])
        return carry

    with metered(None):  # noted already
        carry = scan(watched, carry, data.data)
    data.uses[data.phase] = most
    return carry


def _real(batch: Mapping[str, Tensor]) -> Tensor:
    """Whether a step is more than padding: it has a row, or is a Poisson sample (of which some are empty)."""
    return batch["expected"] > 0 if "expected" in batch else batch["mask"].any()


def repeat(batch: Mapping[str, Any], steps: int) -> Any:
    """One batch as data for ``steps`` steps (no copy)."""
    if isinstance(batch, Guarded):
        return batch.repeated(repeat(batch.data, steps), steps)
    keys = batch["key"] + torch.arange(steps)
    if "mask" not in batch:  # loop engine: a real batch
        index = np.broadcast_to(np.arange(len(batch["y"])), (steps, len(batch["y"])))
        expected = float(batch["expected"]) if "expected" in batch else None
        return Batches(batch["x"], batch["y"], index, keys.numpy(), expected=expected)
    names = [name for name in LEAVES if name in batch and name != "key"]
    wide = {name: batch[name].unsqueeze(0).expand(steps, *batch[name].shape) for name in names}
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
    With a private ``opt`` buffers do not move at all.
    """
    task = _own_risk(risk)
    data, (use,) = _unlocked(data, [opt])
    rates, penalty = rates or {}, penalty or Penalty()
    _note("descend", params, rates)
    if isinstance(data, Batches):
        return _walk(risk, task, params, data, opt, penalty, rates, use)
    if task is not None:
        return descend_stacked(task, params, data, opt, penalty, rates, use)
    return _traced(risk, params, data, opt, penalty, rates, use)


def _unlocked(data: Any, opts: Sequence[Optimizer]) -> tuple[Any, list[int]]:
    """(the data, for each optimiser that walks through them: how often they were used before); guarded data by private ones."""
    if not isinstance(data, Guarded):
        return data, [0] * len(opts)
    if not all(isinstance(opt, Private) for opt in opts):
        raise InvalidArgument(
            f"{data.guard.who} descends on a client's rows without its private optimiser, so it cannot be private; "
            "use another method, or leave privacy out"
        )
    opened = [data.unlock() for _ in opts]
    return opened[0][0], [use for _, use in opened]


@dataclass(frozen=True)
class Turn:
    """A step on one branch of the parameters: ``risk(params, batch)``, of which only ``params[branch]`` moves."""

    branch: str
    risk: Risk
    opt: Optimizer
    rates: Mapping[str, float] = field(default_factory=dict)  # within the branch, as in ``descend``


def alternate(turns: Sequence[Turn], params: Mapping[str, Any], data: Any, channels_last: bool = False) -> dict[str, Any]:
    """On every batch one step of each turn, in order, each from where the one before it left the parameters.

    Branches without a turn stay as they are; each turn has an optimiser's memory of its own. With private optimisers every turn
    is a use of the batches, with noise of its own.
    """
    moving = {turn.branch: params[turn.branch] for turn in turns}
    _note("descend", moving, {f"{turn.branch}/{name}": rate for turn in turns for name, rate in turn.rates.items()})
    if not turns:
        return dict(params)
    data, uses = _unlocked(data, [turn.opt for turn in turns])
    if isinstance(data, Batches):
        return _walk_turns(turns, params, data, channels_last, uses)
    return _trace_turns(turns, params, data, uses)


def gradient_on(risk: Risk, params: Any, batch: Mapping[str, Any]) -> Any:
    """The risk's gradient on one batch; a buffer's is (old - new), see ``Task.risk``."""
    task = _own_risk(risk)
    if task is not None and task.gradient is not None:
        closed = task.gradient(params, batch)
        return {name: closed[name] for name in params}
    return func_grad(risk)(params, batch)


def count_steps(data: Any) -> Any:
    """How many real steps a client has: a number, or a tensor under vmap."""
    if isinstance(data, Guarded):
        data = data.data  # the number of steps is no secret
    if isinstance(data, Batches):
        return data.steps
    return (data["expected"] > 0 if "expected" in data else data["mask"].any(-1)).sum()


def gradient(risk: Risk, params: Any, data: Any, by_rows: bool = False) -> Any:
    """Mean over the batches of the risk's gradient at ``params`` (buffers: zero).

    ``by_rows`` weighs batches by their rows (or real positions): over an epoch, the gradient on all rows.
    """
    task = _own_risk(risk)

    def step(carry: Any, batch: Mapping[str, Any]) -> Any:
        counted = batch.get("mask") if task is None else task.weigh(batch)
        rows = torch.tensor(float(len(batch["y"]))) if counted is None else counted.sum()
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
    risk: Risk,
    task: Task | None,
    params: Any,
    data: Batches,
    opt: Optimizer,
    penalty: Penalty,
    rates: Mapping[str, float],
    use: int,
) -> Any:
    """One client, real batches: automatic or closed-form gradient, steps in place on private copies."""
    wide = task is not None and task.channels_last
    buffers, pace = _kinds(params, rates)
    secret = isinstance(opt, Private)
    own = [_private(leaf, wide) if rate else leaf.detach() for leaf, rate in zip(tree.leaves(params), pace, strict=True)]
    model = tree.refill(params, iter(own))
    state = opt.init(own)
    center, slope = aligned(penalty.center, params), aligned(penalty.slope, params)
    closed_form = task.gradient if task is not None else None
    moving = [leaf for leaf, rate in zip(own, pace, strict=True) if rate]
    if closed_form is None and not secret:
        for leaf in moving:
            leaf.requires_grad_()
    for k, batch in enumerate(data.batches() if moving else ()):
        grads: list[Tensor | None]
        if isinstance(opt, Private):
            grads = private_gradient(opt, risk, task, model, batch, _moves(buffers, pace), use)
        elif closed_form is None:
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


def _moves(buffers: Sequence[bool], pace: Sequence[float]) -> list[bool]:
    """Which leaves have a gradient that is privatised: the parameters that are not frozen."""
    return [bool(rate) and not is_buffer for is_buffer, rate in zip(buffers, pace, strict=True)]


def _private(leaf: Tensor, channels_last: bool) -> Tensor:
    wide = channels_last and leaf.dim() == 4
    return leaf.detach().clone(memory_format=torch.channels_last if wide else torch.contiguous_format)


def _traced(
    risk: Risk, params: Any, data: Mapping[str, Tensor], opt: Optimizer, penalty: Penalty, rates: Mapping[str, float], use: int
) -> Any:
    """Any risk under vmap: differentiate what was traced, keep the carry on padded steps."""
    kinds = _kinds(params, rates)
    center, slope = aligned(penalty.center, params), aligned(penalty.slope, params)
    state: Any = None
    for k, batch in enumerate(_padded(data)):
        old = tree.leaves(params)
        found = _traced_gradient(risk, params, batch, opt, kinds, use)
        grads = add_gradient(found, old, *kinds, penalty.pull, center, slope)
        params, state = _traced_step(params, found, grads, opt, state, k, kinds, _real(batch))
    return params


def _traced_gradient(
    risk: Risk, params: Any, batch: Mapping[str, Tensor], opt: Optimizer, kinds: tuple[list[bool], list[float]], use: int
) -> list[Tensor]:
    """Leaf by leaf; of a private ``opt`` the privatised one, zero where a leaf stays."""
    if not isinstance(opt, Private):
        return tree.leaves(func_grad(risk)(params, batch))
    private = private_gradient(opt, risk, None, params, batch, _moves(*kinds), use)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(private, tree.leaves(params), strict=True)]


def _padded(data: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    names = [name for name in LEAVES if name in data]
    for k in range(data["mask"].shape[0]):
        yield {name: data[name][k] for name in names}


def _traced_step(
    params: Any,
    found: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    opt: Optimizer,
    state: Any,
    k: int,
    kinds: tuple[list[bool], list[float]],
    real: Tensor,
) -> tuple[Any, Any]:
    """(parameters, state) after a step, as they were where it is not ``real``."""
    old = tree.leaves(params)
    new = [torch.zeros_like(g) + p for g, p in zip(found, old, strict=True)]  # as widely batched as the gradient
    if state is None:
        state = opt.init(new)
    before = [[m.clone() for m in memory] for memory in state]
    opt.step_(new, grads, state, k, *kinds, stacked=False)
    params = tree.refill(params, (torch.where(real, n, o) for n, o in zip(new, old, strict=True)))
    return params, [[torch.where(real, m, b) for m, b in zip(ms, bs, strict=True)] for ms, bs in zip(state, before, strict=True)]


def _walk_turns(
    turns: Sequence[Turn], params: Mapping[str, Any], data: Batches, channels_last: bool, uses: Sequence[int]
) -> dict[str, Any]:
    """One client, real batches: steps in place on private copies of the branches that move."""
    own = dict(params)
    for turn in turns:
        own[turn.branch] = tree.map(lambda leaf: _private(leaf, channels_last), params[turn.branch])
    kinds = [_kinds(own[turn.branch], turn.rates) for turn in turns]
    states = [turn.opt.init(tree.leaves(own[turn.branch])) for turn in turns]
    for k, batch in enumerate(data.batches()):
        for turn, (buffers, pace), state, use in zip(turns, kinds, states, uses, strict=True):
            held = tree.leaves(own[turn.branch])
            free = [leaf.detach().requires_grad_(bool(rate)) for leaf, rate in zip(held, pace, strict=True)]  # the same memory
            moving = [leaf for leaf in free if leaf.requires_grad]
            if not moving:
                continue
            grads: list[Tensor | None]
            if isinstance(turn.opt, Private):
                risk = _on_branch(turn, own)
                grads = private_gradient(turn.opt, risk, None, own[turn.branch], batch, _moves(buffers, pace), use)
            else:
                with torch.enable_grad():
                    value = turn.risk({**own, turn.branch: tree.refill(own[turn.branch], iter(free))}, batch)
                    found = iter(torch.autograd.grad(value, moving, allow_unused=True))
                grads = [next(found) if leaf.requires_grad else None for leaf in free]
            with torch.no_grad():
                turn.opt.step_(held, grads, state, k, buffers, pace, stacked=False)
    return {name: tree.map(lambda leaf: leaf.contiguous(), branch) for name, branch in own.items()}


def _on_branch(turn: Turn, params: Mapping[str, Any]) -> Risk:
    """The turn's risk as a function of its branch, the others as they are in ``params`` now."""
    others = dict(params)
    return lambda mine, batch: turn.risk({**others, turn.branch: mine}, batch)


def _trace_turns(
    turns: Sequence[Turn], params: Mapping[str, Any], data: Mapping[str, Tensor], uses: Sequence[int]
) -> dict[str, Any]:
    """All clients of a chunk under vmap."""
    out = dict(params)
    kinds = [_kinds(out[turn.branch], turn.rates) for turn in turns]
    states: list[Any] = [None] * len(turns)
    for k, batch in enumerate(_padded(data)):
        for i, (turn, use) in enumerate(zip(turns, uses, strict=True)):
            mine = out[turn.branch]
            found = _traced_gradient(_on_branch(turn, out), mine, batch, turn.opt, kinds[i], use)
            out[turn.branch], states[i] = _traced_step(mine, found, found, turn.opt, states[i], k, kinds[i], _real(batch))
    return out
