"""A classifier as features and a linear head: the head's input, in training and in evaluation."""

from __future__ import annotations

from torch import Tensor, nn

from fedtailor.errors import InvalidArgument
from fedtailor.task.task import Batch, Model, Task


def needs_head(task: Task, who: str, per_row: bool = True) -> None:
    """Refuse models that are no classifier with one linear layer as its head; with ``per_row``, also labels per position."""
    names = task.groups.get("head", ())
    one = len({name.rpartition(".")[0] for name in names}) == 1 and head_weight(task, task.init()).dim() == 2
    linear = one and (task.forward is None or isinstance(_head(task), nn.Linear))
    if not task.kind.softmax or task.features is None or not linear:
        raise InvalidArgument(f"{who} needs a classifier that ends in a linear layer (its head); use another model or method")
    if per_row and task.inputs is not None and features(task, task.init(), task.inputs).dim() != 2:
        raise InvalidArgument(f"{who} needs one label per row, not one per position; use another method")


def head_weight(task: Task, model: Model) -> Tensor:
    """Return the head's matrix, [outputs, features]."""
    return model[task.groups["head"][0]]


def features(task: Task, model: Model, x: Tensor) -> Tensor:
    """Return the head's input in evaluation mode: the flat rows where the head is the whole model."""
    assert task.features is not None
    return x.flatten(1) if task.forward is None else task.features(model, x)


def training_pass(task: Task, model: Model, batch: Batch) -> tuple[Tensor, Model, Tensor]:
    """Return the logits, the buffers as they are after the pass, and the head's input, in training mode."""
    if task.forward is None:
        return task.apply(model, batch["x"]), {}, batch["x"].flatten(1)
    head_inputs: list[Tensor] = []
    handle = _head(task).register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0]))
    try:
        logits, moved = task.forward(model, batch)
    finally:
        handle.remove()
    return logits, moved, head_inputs[-1]


def _head(task: Task) -> nn.Module:
    assert task.trainer is not None
    assert task.head is not None
    return task.trainer.get_submodule(task.head)
