"""A task on another device, and a task whose passes run in lower precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.errors import InvalidArgument
from fedtailor.task.device import CPU, backend, moved
from fedtailor.task.task import Batch, Model, Task
from fedtailor.tree import BUFFER

WITH_MODULES = ("apply", "forward", "features", "blocks", "prefix", "trainer")  # the fields of a task that may hold modules


def placed(task: Task, device: torch.device) -> Task:
    """Return the same task on another device, where it starts from the same numbers; the given one stays where it is."""
    if device == CPU:
        return task
    copied = copy.deepcopy({name: getattr(task, name) for name in WITH_MODULES})
    functions = getattr(copied["apply"], "__self__", None) or getattr(copied["forward"], "__self__", None)
    modules = [copied["trainer"], getattr(functions, "evaluator", None), getattr(functions, "trainer", None)]
    there: dict[int, tuple[Tensor, Tensor]] = {}
    for module in modules:
        if isinstance(module, nn.Module):
            _place(module, device, there)
    own = {} if copied["trainer"] is None else _state(copied["trainer"])
    return replace(
        task,
        **copied,
        layered=None if task.layered is None else replace(task.layered, forward=copied["forward"]),
        init=lambda: moved(task.init(), device),
        inputs=None if task.inputs is None else moved(task.inputs, device),
        public=None if task.public is None else moved(task.public, device),
        frozen={name: own[name].detach() if name in own else moved(value, device) for name, value in task.frozen.items()},
    )


def _place(module: nn.Module, device: torch.device, there: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Move parameters and buffers, in place; what modules share stays shared (``there``: those moved so far)."""
    slots: list[dict[str, Any]] = [s for layer in module.modules() for s in (layer._parameters, layer._buffers)]
    for slot in slots:
        for name, value in slot.items():
            if value is None or value.device == device:
                continue
            if id(value) not in there:
                new = value.detach().to(device)
                new = nn.Parameter(new, value.requires_grad) if isinstance(value, nn.Parameter) else new
                there[id(value)] = value, new  # the old one is kept as long as its id stands for it
            slot[name] = there[id(value)][1]


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **{BUFFER + name: value for name, value in module.named_buffers()}}


def lowered(task: Task, device: torch.device) -> Task:
    """Return the task with its passes in bfloat16 where torch finds that safe; models, losses and steps stay as they are.

    Layers that a method runs one by one (Flow's routes) stay in full precision, and so do gradients in closed form.
    """
    return replace(
        task,
        apply=_Lowered(task.apply, device.type),
        forward=None if task.forward is None else _Lowered(task.forward, device.type),
        features=None if task.features is None else _Lowered(task.features, device.type),
    )


def check_gain(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse lower precision where nothing is won by it."""
    if dtype != torch.float32:
        raise InvalidArgument("autocast lowers the precision of float32 runs; leave it out, or use dtype='float32'")
    if not backend(device).gains(device):
        raise InvalidArgument(
            f"autocast='bf16' gains nothing on {device} ({backend(device).title(device)}); leave it out, or use a CUDA device of "
            "compute capability 8.0 or higher"
        )


@dataclass(frozen=True, eq=False)
class _Lowered:
    """A pass in bfloat16 whose outputs are float32 again."""

    function: Callable[..., Any]
    kind: str  # of device

    def __call__(self, model: Model, data: Tensor | Batch) -> Any:
        with torch.autocast(self.kind, torch.bfloat16):
            out = self.function(model, data)
        if isinstance(out, Tensor):
            return out.float()
        logits, moved_buffers = out
        return logits.float(), {name: value.to(model[name]) for name, value in moved_buffers.items()}
