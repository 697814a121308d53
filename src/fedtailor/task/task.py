"""Task: a model and a loss as pure functions. Every torch module becomes one by ``Task.from_module``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedtailor import tree
from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.task.frozen import Stretch, copies, frozen_names, prefix_length
from fedtailor.task.layers import batch_context
from fedtailor.task.losses import LOSSES, Loss, targets
from fedtailor.task.parts import Block, Part, default_groups, named_groups, split_blocks
from fedtailor.task.rows import Sums, clipped_by_layer, layers_of, shrink
from fedtailor.tree import BUFFER

Model = dict[str, Tensor]
Batch = Mapping[str, Tensor]
Clipped = Callable[[Model, Batch, float, Collection[str]], Sums]


class Prefix(NamedTuple):
    """The frozen first layers, as a function of the rows, and the task that takes their output; models are the same for both."""

    layers: tuple[str, ...]
    apply: Callable[[Tensor], Tensor]
    rest: Task


@dataclass(frozen=True, eq=False)
class Task:
    """A model and its loss.

    ``apply(model, x)`` predicts in evaluation mode. ``forward(model, batch)`` is the training pass: logits, and the
    buffers as they are after it. A model is what moves: what the module has frozen (``requires_grad=False``, and the statistics
    of frozen norms) is in ``held``, once for all clients, never sent, and ``prefix`` are the first layers that it alone makes
    up. ``gradient(model, batch)``, where the model has one in closed form, replaces automatic
    differentiation of the risk; it also takes models and batches stacked along a first client axis.
    """

    apply: Callable[[Model, Tensor], Tensor]
    example_loss: Callable[[Tensor, Tensor], Tensor]
    init: Callable[[], Model]
    features: Callable[[Model, Tensor], Tensor] | None = None
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    blocks: Sequence[Block] = ()
    public: Tensor | None = None
    classes: int = 0
    kind: str = "classification"
    forward: Callable[[Model, Batch], tuple[Tensor, Model]] | None = None
    gradient: Callable[[Model, Batch], Model] | None = None
    held: Mapping[str, Tensor] = field(default_factory=dict)  # the frozen part, which is not in the model
    prefix: Prefix | None = None
    channels_last: bool = False  # convolutions run faster on a CPU with their weights in this layout
    unscored: int | None = None  # the class (of unknown words) whose targets count in the loss but not in the accuracy
    row_bytes: int = 0  # about what a position of a row takes in a training step beyond the row itself (0: not told)
    inputs: Tensor | None = None  # no rows, but the shape and type that rows have; known once the task meets data
    seed: int = 0  # for what a method starts at random beside the model
    trainer: nn.Module | None = None  # what ``forward`` runs
    clipped: Clipped | None = None  # sums of clipped gradients in closed form; takes stacked models and batches as well
    notes: tuple[str, ...] = ()  # what a user should know about the start

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Parameters and buffers that move, in the order of the model."""
        return tuple(self.init())

    @cached_property
    def layers(self) -> dict[str, nn.Module] | None:
        """The layers by which rows' gradients can be clipped without being written down; None where that is not possible."""
        return None if self.trainer is None else layers_of(self.trainer)

    def clipped_rows(self, model: Model, batch: Batch, clip: float, names: Collection[str]) -> Sums | None:
        """Sums over a batch's rows of the gradients of ``names``, each row's clipped; None where it must be done row by row."""
        if self.clipped is not None:
            return self.clipped(model, batch, clip, names)
        if not self.layers or self.forward is None or batch.get("mask") is not None:
            return None
        forward = self.forward
        return clipped_by_layer(self.layers, lambda: self.example_loss(forward(model, batch)[0], batch["y"]), names, clip)

    def risk(self, model: Model, batch: Batch) -> Tensor:
        """Mean loss over the real rows of a batch (the risk to descend on); with a label per position, over their real positions.

        A buffer's gradient is (old - new): the term added for it is zero, and an optimiser moves buffers with step one.
        That way batch-norm statistics follow whatever a method does with its models, with no second channel.
        """
        if self.forward is None:
            logits = self.apply(model, batch["x"])
            moved: Model = {}
        else:
            logits, moved = self.forward(model, batch)
        return self.risk_of(logits, batch, model, moved)

    def risk_of(self, logits: Tensor, batch: Batch, model: Model, moved: Model) -> Tensor:
        """The risk of logits, and of the buffers as they were moved on the way to them."""
        loss = self.mean_loss(logits, batch)
        for name, new in moved.items():
            old = model[name]
            loss = loss + ((old - old.detach()) * (old.detach() - new.detach())).sum()
        return loss

    def mean_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The loss over a batch: the mean over its real rows, or over their real positions."""
        return self.mean_over(self.example_loss(logits, batch["y"]), batch)

    def mean_over(self, values: Tensor, batch: Batch) -> Tensor:
        """Mean over a batch of one number per row, each row counted as ``weigh`` says."""
        weight = self.weigh(batch)
        return values.mean() if weight is None else (values * weight).sum() / weight.sum().clamp(min=1)

    def weigh(self, batch: Batch) -> Tensor | None:
        """What each row counts in a mean over the batch: one, or its real positions; a padded row nothing. None: all alike."""
        mask = batch.get("mask")
        if self.kind != "classification" or batch["y"].dim() == 1:
            return mask
        count = targets(self.kind, batch["y"])
        return count if mask is None else count * mask

    @staticmethod
    def from_module(
        module: nn.Module,
        loss: str = "cross_entropy",
        *,
        groups: Mapping[str, Sequence[str | nn.Module]] | None = None,
        blocks: Sequence[Part | Sequence[Part]] | None = None,
        public: Tensor | None = None,
        classes: int = 0,
    ) -> Task:
        """Any torch module as a task; training starts from the module's present weights.

        ``loss`` is ``cross_entropy``, ``mse`` (half the squared error) or ``bce`` (several 0/1 labels). ``groups`` adds
        to or replaces the groups found by module (head, body, norm); ``blocks`` names the layers in order where the
        module is not an ``nn.Sequential`` (a tuple of names is one block). A module may declare both as attributes. With
        ``cross_entropy`` y has a label per row, or one per position [rows, positions] with -1 where a row is padded.

        A module with the attribute ``channels_last = True`` says that it never calls ``view`` on a feature map; its
        convolutions then train faster in the loop engine.
        """
        if loss not in LOSSES:
            raise InvalidArgument(f"unknown loss {loss!r}; use one of {', '.join(LOSSES)}")
        if not isinstance(module, nn.Module):
            raise InvalidArgument(f"a model must be a torch.nn.Module, not {type(module).__name__}")
        theirs = _own(module, "groups", {})  # a convolution's `groups` is a number
        declared = {**(theirs if isinstance(theirs, Mapping) else {}), **(groups or {})}
        own = _own(module, "blocks", None)
        if blocks is None and isinstance(own, tuple):
            blocks = own
        return _from_module(module, LOSSES[loss], declared, blocks, public, classes)

    def check_fit(self, x: Tensor, y: Tensor, labels: int) -> None:
        """Raise ``ModelMismatch`` unless the model takes these rows and its output fits these labels."""
        try:
            with torch.no_grad():
                logits = self.apply(self.init(), x[:2])
        except ModelMismatch:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            first = str(error).splitlines()[0]
            raise ModelMismatch(
                f"the model does not take inputs of shape {tuple(x.shape[1:])} and type {x.dtype}: {first}; "
                "change the model's input layer or reshape the features"
            ) from error
        if not isinstance(logits, Tensor):
            raise ModelMismatch(
                f"the model's output is a {type(logits).__name__}, not a tensor; let its forward return only the logits"
            )
        if self.kind == "classification":
            if y.dim() == 2 and (logits.dim() != 3 or logits.shape[1] != y.shape[1]):
                raise ModelMismatch(
                    f"the model's output has shape {tuple(logits.shape[1:])} per row but there is a label for each of "
                    f"{y.shape[1]} positions; let it return [rows, {y.shape[1]}, {labels}]"
                )
            if logits.dim() != 1 + y.dim() or logits.shape[-1] < labels:
                raise ModelMismatch(
                    f"the model's output has shape {tuple(logits.shape[1:])} per row but the labels have {labels} classes; "
                    f"give the last layer {labels} outputs"
                )
        elif logits[0].numel() != y[0].numel():
            raise ModelMismatch(
                f"the model's output has {logits[0].numel()} numbers per row but the targets have {y[0].numel()}; "
                "change the last layer"
            )


def _from_module(
    module: nn.Module,
    loss: Loss,
    groups: Mapping[str, Sequence[str | nn.Module]] | None,
    blocks: Sequence[Part | Sequence[Part]] | None,
    public: Tensor | None,
    classes: int,
) -> Task:
    ours = named_groups(module, groups or {})  # before copying: modules are found by identity
    chain = split_blocks(module, blocks)
    frozen = frozen_names(module)
    state, names = _state(module)
    start = tree.drop(state, frozen)
    evaluator, trainer, held = copies(module, frozen)
    every = {**default_groups(module), **ours}
    head = _owner(names[every["head"][0]]) if every.get("head") else None
    linear = not held and (type(module) is nn.Linear or getattr(module, "is_linear_task", False))
    functions = _Functions(evaluator, trainer, names)
    task = Task(
        apply=_linear_apply if linear else functions.apply,
        example_loss=loss.example,
        init=lambda: {name: value.clone() for name, value in start.items()},
        features=functions.before(head) if head is not None else None,
        groups={group: tuple(name for name in members if name in start) for group, members in every.items()},
        blocks=tuple(block.bind(evaluator, trainer, start) for block in chain),
        public=public,
        classes=classes,
        kind=loss.kind,
        forward=None if linear else functions.forward,
        gradient=_linear_gradient(loss) if linear else None,
        held=held,
        channels_last=bool(_own(module, "channels_last", False)),
        row_bytes=int(_own(module, "row_bytes", 0)),
        notes=tuple(_own(module, "notes", ())),
        trainer=trainer,
        clipped=_linear_clipped(loss) if linear else None,
    )
    paths = [path for block in chain for path in block.path]
    cut = prefix_length(trainer, paths, frozen)
    return replace(task, prefix=_prefix(task, functions, paths, cut, head)) if cut else task


class _Functions(NamedTuple):
    """A module's two copies as functions of (model, x); what the model does not name, the module has."""

    evaluator: nn.Module
    trainer: nn.Module
    names: Mapping[str, str]  # ours to torch's

    def apply(self, model: Model, x: Tensor) -> Tensor:
        return functional_call(self.evaluator, {self.names[k]: v for k, v in model.items()}, (x,))

    def forward(self, model: Model, batch: Batch) -> tuple[Tensor, Model]:
        state = {self.names[k]: v for k, v in model.items()}
        with batch_context(batch.get("mask"), batch.get("key"), batch.get("row")):
            logits = functional_call(self.trainer, state, (batch["x"],))  # a rebound buffer is written back to `state`
        return logits, {k: state[self.names[k]] for k in model if k.startswith(BUFFER)}

    def before(self, path: str) -> Callable[[Model, Tensor], Tensor]:
        """What enters the layer ``path``."""

        def features(model: Model, x: Tensor) -> Tensor:
            seen: list[Tensor] = []
            layer = self.evaluator.get_submodule(path)
            handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
            try:
                self.apply(model, x)
            finally:
                handle.remove()
            return seen[-1]

        return features


def _prefix(task: Task, whole: _Functions, paths: Sequence[str], cut: int, head: str | None) -> Prefix:
    first, after = Stretch(whole.evaluator, paths[:cut]), paths[cut:]
    rest = _Functions(Stretch(whole.evaluator, after), Stretch(whole.trainer, after), whole.names)
    blocks = [replace(b, path=tuple(p for p in b.path if p in after)) for b in task.blocks]
    return Prefix(
        layers=tuple(paths[:cut]),
        apply=Still(first),
        rest=replace(
            task,
            apply=rest.apply,
            forward=rest.forward,
            features=rest.before(head) if head is not None else None,
            blocks=tuple(block for block in blocks if block.path),
        ),
    )


@dataclass(frozen=True, eq=False)
class Still:
    """A module as a function that nothing flows back through."""

    module: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.module(x)


def _own(module: nn.Module, name: str, default: Any) -> Any:
    """What a module declares itself; a wrapper may pass on what its inner module declares, whose names are then not its own."""
    found = inspect.getattr_static(module, name, default)
    return getattr(module, name) if isinstance(found, property) else found


def _owner(name: str) -> str:
    return name.rsplit(".", 1)[0] if "." in name else ""


def _state(module: nn.Module) -> tuple[Model, dict[str, str]]:
    """All parameters and statistics, and for each of our names torch's name. Integer buffers stay in the module."""
    start: dict[str, Tensor] = {k: v.detach().clone() for k, v in module.named_parameters()}
    names = {k: k for k in start}
    for name, value in module.named_buffers():
        if value.is_floating_point():
            start[BUFFER + name] = value.detach().clone()
            names[BUFFER + name] = name
    if not any(p.requires_grad for p in module.parameters()):
        raise InvalidArgument("the module has no parameters to train; give it a layer with weights (requires_grad=True)")
    return start, names


def _linear_apply(model: Model, x: Tensor) -> Tensor:
    return F.linear(x.flatten(1), model["weight"], model.get("bias"))


def _linear_gradient(loss: Loss) -> Callable[[Model, Batch], Model]:
    """Gradient of the risk of a linear model, weights [.., K, d], rows [.., B, d], with or without a client axis."""

    def gradient(model: Model, batch: Batch) -> Model:
        x, residual = _linear_residual(loss, model, batch)
        mask = batch.get("mask")
        if mask is None:
            residual /= x.shape[-2]
        else:
            residual *= (mask / mask.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(-1)
        out = {"weight": residual.transpose(-1, -2) @ x}
        if "bias" in model:
            out["bias"] = residual.sum(-2)
        return out

    return gradient


def _linear_residual(loss: Loss, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """(rows, the losses' gradients at the logits)."""
    weight = model["weight"]
    x = batch["x"].flatten(weight.dim() - 1)
    if "bias" in model:
        product = torch.baddbmm if weight.dim() == 3 else torch.addmm
        logits = product(model["bias"].unsqueeze(-2), x, weight.transpose(-1, -2))
    else:
        logits = x @ weight.transpose(-1, -2)
    return x, loss.residual(logits, batch["y"])


def _linear_clipped(loss: Loss) -> Clipped:
    """A row's gradient is residual x', of squared norm |residual|^2 |x|^2, and residual for the bias."""

    def clipped(model: Model, batch: Batch, clip: float, names: Collection[str]) -> Sums:
        x, residual = _linear_residual(loss, model, batch)
        reach = x.square().sum(-1) * float("weight" in names) + float("bias" in names)
        factor = shrink((residual.square().sum(-1) * reach).sqrt(), clip)
        mask = batch.get("mask")
        residual *= (factor if mask is None else factor * mask).unsqueeze(-1)
        sums = {"weight": lambda: residual.transpose(-1, -2) @ x, "bias": lambda: residual.sum(-2)}
        return {name: sums[name]() for name in names}

    return clipped
