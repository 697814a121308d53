"""The training loops: ``scan`` folds a step over a client's batches, ``descend`` minimizes a risk, ``alternate`` several.

One algorithm text serves both engines. On the loop engine ``data`` is a ``Batches`` and is walked batch by batch. Under
``vmap`` (vectorized engine) it is a dict of padded tensors: ``scan`` keeps the carry on padded steps, and ``descend`` on
a task's own risk steps out of vmap to run all clients' steps on stacked tensors (``local/stacked.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad as func_grad

from fedtailor import tree
from fedtailor.data.batches import Batches
from fedtailor.data.guard import Guarded
from fedtailor.data.secret import NO_USE, Use
from fedtailor.errors import InvalidArgument
from fedtailor.local.descent import LEAVES, Descent, Followed, Padded, Point, Walked, copied, take_steps
from fedtailor.local.gradients import Risk, Source, inside_transform, is_followed, task_of
from fedtailor.local.meter import running
from fedtailor.local.optim import Optimizer
from fedtailor.local.penalty import Penalty
from fedtailor.local.stacked import descend_stacked
from fedtailor.task.device import CPU, widest


def scan(step: Callable[[Any, Mapping[str, Any]], Any], carry: Any, data: Any) -> Any:
    """Fold ``step(carry, batch)`` over the batches; a padded step leaves the carry untouched.

    ``batch["step"]`` is the number of the step, counted from 0.
    """
    end = _fold(step, carry, data)
    if (meter := running()) is not None:
        meter.scans.add(carry, end, {})
    return end


def _fold(step: Callable[[Any, Mapping[str, Any]], Any], carry: Any, data: Any) -> Any:
    if isinstance(data, Guarded):
        return _fold_guarded(step, carry, data)
    if isinstance(data, Batches):
        for s, batch in enumerate(data.batches()):
            carry = step(carry, {**batch, "step": s})
        return carry
    for s, (is_real, padded) in enumerate(Padded(data).steps()):
        carry = tree.where(is_real, step(carry, {**padded, "step": s}), carry)
    return carry


def _fold_guarded(step: Callable[[Any, Mapping[str, Any]], Any], carry: Any, data: Guarded) -> Any:
    """Fold over guarded data: every batch is guarded too, and uses are counted for each batch by itself."""
    before = data.uses.get(data.phase, 0)
    most = before

    def counted_step(carry: Any, batch: Mapping[str, Any]) -> Any:
        nonlocal most
        data.uses[data.phase] = before
        carry = step(carry, data.batch(batch))
        most = max(most, data.uses[data.phase])
        return carry

    carry = _fold(counted_step, carry, data.data)
    data.uses[data.phase] = most
    return carry


def repeat(batch: Mapping[str, Any], steps: int) -> Any:
    """Return one batch as data for ``steps`` steps (no copy)."""
    if isinstance(batch, Guarded):
        return batch.repeated(repeat(batch.data, steps), steps)
    keys = batch["key"] + torch.arange(steps, device=batch["key"].device)
    if "mask" not in batch:  # loop engine: a real batch
        index = np.broadcast_to(np.arange(len(batch["y"])), (steps, len(batch["y"])))
        expected = float(batch["expected"]) if "expected" in batch else None
        return Batches(batch["x"], batch["y"], index, keys.numpy(), expected=expected, weights=batch.get("weight"))
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

    ``risk`` is ``task.risk`` (or a function that only hands it on), or any function of (params, batch); ``params`` may then be
    any tree. ``rates`` multiplies the step size of single parameters; with rate 0 a parameter (or buffer) is frozen: no
    gradient, no decay, no momentum. With a private ``opt`` buffers do not move at all.

    What it returns can be differentiated, in ``params``, the penalty, the rows, the step size and whatever ``risk`` is a
    function of, wherever somebody does (``torch.func.grad`` around it, or tensors on the tape); the steps are then slower, and
    all of them are kept.
    """
    data, (use,) = _unlocked(data, [opt])
    rates, penalty, meter = rates or {}, penalty or Penalty(), running()
    asked = task_of(risk, params, lambda: _first(data))
    followed = asked.followed or is_followed(params, *penalty.tensors(), _rows(data), _rate(opt))
    if asked.task is not None and not followed and not isinstance(data, Batches):
        end = descend_stacked(asked.task, params, data, opt, penalty, rates, use)
    else:
        view = _view(data, followed, [opt])
        traced = isinstance(view, Followed)
        source = Source(risk, None if followed else asked.task, params, rates, traced=traced)
        channels_last = asked.task is not None and asked.task.channels_last
        point = Point(params, _start(params, source.paces, view, channels_last))
        (end,) = _end([Descent(source, point, opt, penalty, use)], view)
    if meter is not None:
        meter.descents.add(params, end, rates)
        meter.detours |= asked.detour
    return end


def _rows(data: Any) -> Any:
    """Return a client's rows, as they are given."""
    return data.rows if isinstance(data, Batches) else data["x"]


def _rate(opt: Optimizer) -> Any:
    """Return an optimiser's step size, of the first step where it changes with them."""
    return opt.lr(0) if callable(opt.lr) else opt.lr


def _view(data: Any, followed: bool, opts: Sequence[Optimizer]) -> Walked:
    """Return how the steps see the data; ``followed``: so that they can be differentiated through."""
    if followed and any(opt.privacy is not None for opt in opts):
        raise InvalidArgument("a private descent cannot be differentiated through; leave privacy out, or detach its parameters")
    if not isinstance(data, Batches):
        return Padded(data)
    return Followed(data) if followed or inside_transform() else Walked(data)


def _first(data: Any) -> Mapping[str, Tensor] | None:
    """Return the first batch, or None if there is none."""
    steps = data.batches() if isinstance(data, Batches) else (batch for _, batch in Padded(data).steps())
    return next(iter(steps), None)


def _start(params: Any, paces: Sequence[float], view: Walked, channels_last: bool) -> list[Tensor]:
    """Return the leaves that a descent begins with: copies of those that will move in place."""
    leaves = tree.leaves(params)
    if isinstance(view, Followed):
        return leaves
    return [copied(leaf, channels_last) if pace else leaf.detach() for leaf, pace in zip(leaves, paces, strict=True)]


def _end(descents: Sequence[Descent], view: Walked) -> list[Any]:
    """Return the parameters of each descent after all have taken turns on all batches."""
    if isinstance(view, Followed):
        take_steps(descents, view)
        return [descent.point.tree for descent in descents]
    with torch.no_grad():
        take_steps(descents, view)
    return [tree.map(lambda leaf: leaf.contiguous(), descent.point.tree) for descent in descents]


def _unlocked(data: Any, opts: Sequence[Optimizer]) -> tuple[Any, list[Use]]:
    """Return the data, and for each optimizer which use of them it is; only private ones may open guarded data."""
    if not isinstance(data, Guarded):
        return data, [NO_USE] * len(opts)
    if any(opt.privacy is None for opt in opts):
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
    """Take one step of each turn on every batch, in order, each from where the one before it left the parameters.

    Branches without a turn stay as they are; each turn has an optimiser's memory of its own. With private optimisers every turn
    is a use of the batches, with noise of its own.
    """
    if not turns:
        return dict(params)
    data, uses = _unlocked(data, [turn.opt for turn in turns])
    points: dict[str, Point] = {}
    descents = []
    view = _view(data, is_followed(params, _rows(data), *[_rate(turn.opt) for turn in turns]), [turn.opt for turn in turns])
    for turn, use in zip(turns, uses, strict=True):
        branch_params = params[turn.branch]
        source = Source(_on_branch(turn, params, points), None, branch_params, turn.rates, traced=isinstance(view, Followed))
        if turn.branch not in points:
            points[turn.branch] = Point(branch_params, _start(branch_params, [1.0] * len(source.paces), view, channels_last))
        descents.append(Descent(source, points[turn.branch], turn.opt, Penalty(), use))
    ends = _end(descents, view)
    new = {**params, **{turn.branch: end for turn, end in zip(turns, ends, strict=True)}}
    if (meter := running()) is not None:
        moving = {branch: params[branch] for branch in points}
        rates = {f"{turn.branch}/{name}": rate for turn in turns for name, rate in turn.rates.items()}
        meter.descents.add(moving, {branch: new[branch] for branch in points}, rates)
    return new


def _on_branch(turn: Turn, params: Mapping[str, Any], points: Mapping[str, Point]) -> Risk:
    """Return the turn's risk as a function of its branch, with the other branches as they are now."""

    def risk(own: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return turn.risk({**params, **{branch: point.tree for branch, point in points.items()}, turn.branch: own}, batch)

    return risk


def gradient_on(risk: Risk, params: Any, batch: Mapping[str, Any]) -> Any:
    """Return the risk's gradient on one batch; a buffer's is (old - new), see ``Task.risk``."""
    task = task_of(risk, params, lambda: batch).task
    if task is not None and task.gradient is not None and not is_followed(params, batch["x"]):
        closed = task.gradient(params, batch)
        return {name: closed[name] for name in params}
    return func_grad(risk)(params, batch)


def count_steps(data: Any) -> Any:
    """Return how many real steps a client has: a number, or a tensor under vmap."""
    if isinstance(data, Guarded):
        data = data.data  # the number of steps is no secret
    if isinstance(data, Batches):
        return data.steps
    return (data["expected"] > 0 if "expected" in data else data["mask"].any(-1)).sum()


def rows_of(risk: Risk, params: Any, batch: Mapping[str, Any]) -> Tensor:
    """Return the number of real rows of a batch (or real positions, where ``risk`` is a mean over them)."""
    task = task_of(risk, params, lambda: batch).task
    counted = batch.get("mask") if task is None else task.weigh(batch)
    if counted is None:
        return torch.tensor(float(len(batch["y"])), dtype=widest(batch["y"].device))
    return counted.sum().to(widest(counted.device))


def no_rows(params: Any) -> Tensor:
    """Return a count of rows to begin with, in the most precise numbers of the device."""
    device = next((leaf.device for leaf in tree.leaves(params)), CPU)
    return torch.zeros((), dtype=widest(device), device=device)


def gradient(risk: Risk, params: Any, data: Any, by_rows: bool = False) -> Any:
    """Return the mean over the batches of the risk's gradient at ``params`` (buffers: zero).

    ``by_rows`` weighs batches by their rows (or real positions): over an epoch, the gradient on all rows.
    """

    def step(carry: Any, batch: Mapping[str, Any]) -> Any:
        weight = rows_of(risk, params, batch) if by_rows else torch.ones_like(carry["weight"])
        weighted = tree.map(lambda leaf: leaf * weight.to(leaf), gradient_on(risk, params, batch))
        return {"sum": tree.add(carry["sum"], weighted), "weight": carry["weight"] + weight}

    if (meter := running()) is not None:
        meter.differentiates(params)
    total = _fold(step, {"sum": tree.zeros(params), "weight": no_rows(params)}, data)
    mean = tree.map(lambda leaf: leaf / total["weight"].to(leaf), total["sum"])
    return tree.refill(params, (torch.zeros_like(g) if tree.is_buffer(path) else g for path, g in tree.items(mean)))
