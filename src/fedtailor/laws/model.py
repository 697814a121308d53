"""``check_model``: what of a module breaks which promise, found by trying it on a few rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.engine.modules import ModuleProblem, findings
from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.task import Task
from fedtailor.task.kinds import KINDS
from fedtailor.task.own import plain_module
from fedtailor.task.packing import Packing, is_packable

ROWS = 4


def check_model(module: nn.Module | Task, x: Any = None, y: Any = None, loss: str = "cross_entropy") -> list[ModuleProblem]:
    """Return what a module breaks of the promises of a run: form (lazy, complex, ...), randomness, memory, buffers, rows apart,
    engines agree; and what is good to know of it (tied weights, compiled).

    An empty list is a module that trains alike on every engine. A finding says in ``words`` what is wrong, and whether it is
    ``refused`` or right on the loop engine only (``loop_only``). ``x`` and ``y`` are a few rows (x may be a dict or a tuple of
    parts); without them, rows are drawn for the first layer, if that is linear. A run does the same before its first round.
    """
    if not isinstance(module, (nn.Module, Task)):
        raise InvalidArgument(f"check_model needs a torch.nn.Module or a Task, not {type(module).__name__}")
    packing = Packing.of(x, "x") if is_packable(x) else None
    x = x if packing is None else packing.pack(x)
    notes: tuple[str, ...] = ()
    if isinstance(module, nn.Module):
        try:
            module, notes = plain_module(module)
            task = Task.from_module(module, loss, packing=packing)
        except InvalidArgument as error:
            return [ModuleProblem("form", str(error), refused=True)]
    else:
        task = module
    kind = next((kind for kind in KINDS.values() if kind.loss == loss), task.kind)
    like = next(iter(task.init().values()))
    rows = _rows(module, like) if x is None else torch.as_tensor(x)
    rows = rows.to(like.dtype) if rows.is_floating_point() else rows
    logits = _logits(task, rows)
    targets = _targets(kind.softmax, logits) if y is None else torch.as_tensor(y)
    task.check_fit(rows, targets, logits.shape[-1])
    return [*findings(task, rows, targets, len(rows)), *(ModuleProblem("compiled", note) for note in notes)]


@torch.no_grad()
def _logits(task: Task, rows: Tensor) -> Tensor:
    before = torch.get_rng_state()
    try:
        return task.apply(task.init(), rows)
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelMismatch(f"the module does not take rows of shape {tuple(rows.shape[1:])} ({text}); give others") from error
    finally:
        torch.set_rng_state(before)


def _rows(module: nn.Module | Task, like: Tensor) -> Tensor:
    layers = [] if isinstance(module, Task) else [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    if not layers or not isinstance(layers[0], nn.Linear):
        raise InvalidArgument("the shape of rows is not known; give a few: check_model(module, x)")
    draw = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, layers[0].in_features, generator=draw, dtype=torch.float64).to(like.dtype)


def _targets(softmax: bool, logits: Tensor) -> Tensor:
    if softmax:
        return (torch.arange(logits[..., 0].numel()) % logits.shape[-1]).view(logits.shape[:-1])
    return (torch.arange(logits.numel()) % 2).view(logits.shape).to(logits.dtype)
