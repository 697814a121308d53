"""``check_model``: what of a module breaks which promise, found by trying it on a few rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.engine.modules import ModuleProblem, findings
from fedtailor.errors import InvalidArgument
from fedtailor.task import Task
from fedtailor.task.kinds import KINDS
from fedtailor.task.own import plain_module
from fedtailor.task.packing import Packing, is_packable

ROWS = 4


def check_model(module: nn.Module | Task, x: Any = None, y: Any = None, loss: str = "cross_entropy") -> list[ModuleProblem]:
    """Return what a module breaks of the promises of a run: randomness, memory, buffers, rows apart, tied weights, engines agree.

    An empty list is a module that trains alike on every engine. A finding says in ``words`` what is wrong, and whether it is
    ``refused`` or right on the loop engine only (``loop_only``). ``x`` and ``y`` are a few rows (x may be a dict or a tuple of
    parts); without them, rows are drawn for the first layer, if that is linear. A run does the same before its first round.
    """
    if not isinstance(module, (nn.Module, Task)):
        raise InvalidArgument(f"check_model needs a torch.nn.Module or a Task, not {type(module).__name__}")
    packing = Packing.of(x, "x") if is_packable(x) else None
    x = x if packing is None else packing.pack(x)
    task = module if isinstance(module, Task) else Task.from_module(plain_module(module)[0], loss, packing=packing)
    kind = next((kind for kind in KINDS.values() if kind.loss == loss), task.kind)
    like = next(iter(task.init().values()))
    rows = _rows(module, like) if x is None else torch.as_tensor(x)
    rows = rows.to(like.dtype) if rows.is_floating_point() else rows
    with torch.no_grad():
        logits = task.apply(task.init(), rows)
    targets = _targets(kind.softmax, logits) if y is None else torch.as_tensor(y)
    task.check_fit(rows, targets, logits.shape[-1])
    return findings(task, rows, targets)


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
