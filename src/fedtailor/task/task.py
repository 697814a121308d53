"""Task: a model and a loss as pure functions. Every torch module becomes one by ``Task.from_module``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedtailor import tree
from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.task.dense import DenseForms
from fedtailor.task.frozen import Segment, copies, frozen_names, prefix_length
from fedtailor.task.kinds import CLASSIFICATION, KINDS, Kind, kind_of
from fedtailor.task.layers import batch_context, keyed
from fedtailor.task.linear import SMALLEST, Batch, LinearForms, Model, linear_apply, weights_of
from fedtailor.task.own import called, draws, in_place_buffers, other_places, plain_module, tied
from fedtailor.task.packing import Call, Packing
from fedtailor.task.parts import Block, Part, default_groups, named_groups, split_blocks
from fedtailor.task.question import Question
from fedtailor.task.rows import Sums, clipped_by_layer, layers_of
from fedtailor.task.scores import Metric
from fedtailor.tree import BUFFER

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
    of frozen norms) is in ``frozen``, once for all clients, never sent, and ``prefix`` are the first layers that it alone makes
    up. ``gradient(model, batch)``, where the model has one in closed form, replaces automatic
    differentiation of the risk; it also takes models and batches stacked along a first client axis. A closed form of ours goes
    when the loss it was derived for is replaced.
    """

    apply: Callable[[Model, Tensor], Tensor]
    example_loss: Callable[[Tensor, Tensor], Tensor]
    init: Callable[[], Model]
    features: Callable[[Model, Tensor], Tensor] | None = None
    head: str | None = None  # the path of the layer whose input ``features`` is
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    blocks: Sequence[Block] = ()
    public: Tensor | None = None
    classes: int = 0
    kind: Kind = CLASSIFICATION
    forward: Callable[[Model, Batch], tuple[Tensor, Model]] | None = None
    gradient: Callable[[Model, Batch], Model] | None = None
    frozen: Mapping[str, Tensor] = field(default_factory=dict)  # the frozen part, which is not in the model
    prefix: Prefix | None = None
    channels_last: bool = False  # convolutions run faster on a CPU with their weights in this layout
    unscored: int | None = None  # the class (of unknown words) whose targets count in the loss but not in the accuracy
    row_bytes: int = 0  # approximate memory of a row's position in a training step, beyond the row itself (0: unknown)
    inputs: Tensor | None = None  # an empty tensor with the shape and type of rows; known once the task meets data
    seed: int = 0  # of what a method initializes at random beside the model
    clients: int = 0  # an upper bound on those that take part; known once the task meets data
    trainer: nn.Module | None = None  # the module that ``forward`` runs
    layered: DenseForms | None = None  # the gradient of stacked models and batches where the network is linear layers and ReLU
    clipped: Clipped | None = None  # sums of clipped gradients in closed form; takes stacked models and batches as well
    metrics: tuple[Metric, ...] = ()  # beside those of the kind
    notes: tuple[str, ...] = ()  # for the user, on how the model starts and what it is judged by
    lead: Metric | None = None  # the score that was asked for (None: the kind's own)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", kind_of(self.kind))
        for name in ("gradient", "clipped"):
            form = getattr(getattr(self, name), "__self__", None)
            if isinstance(form, LinearForms) and not form.fits(self.apply, self.example_loss):
                object.__setattr__(self, name, None)
        if self.layered is not None and not self.layered.fits(self.forward, self.example_loss):
            object.__setattr__(self, "layered", None)

    @property
    def score(self) -> Metric:
        """The measure that chooses, ranks and is tested."""
        return self.lead or self.kind.score

    @cached_property
    def measured(self) -> tuple[Metric, ...]:
        """All measures that are taken, the score among them (at every evaluation, and not only at the end)."""
        known = {metric.name: metric for metric in (*self.kind.metrics, *self.metrics, self.score)}
        return tuple(replace(metric, late=False) if name == self.score.name else metric for name, metric in known.items())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Parameters and buffers that move, in the order of the model."""
        return tuple(self.init())

    @cached_property
    def layers(self) -> dict[str, nn.Module] | None:
        """The layers with which rows' gradients can be clipped without storing them; None where that is not possible."""
        return None if self.trainer is None else layers_of(self.trainer)

    def clipped_rows(self, model: Model, batch: Batch, clip: float, names: Collection[str]) -> Sums | None:
        """Return sums over a batch's rows of clipped gradients of ``names``; None where it must be done row by row."""
        if self.clipped is not None:
            return self.clipped(model, batch, clip, names)
        if not self.layers or self.forward is None or batch.get("mask") is not None:
            return None
        forward = self.forward
        return clipped_by_layer(self.layers, lambda: self.example_loss(forward(model, batch)[0], batch["y"]), names, clip)

    def risk(self, model: Model, batch: Batch) -> Tensor:
        """Return the mean loss over the real rows of a batch (with a label per position, over their real positions).

        A buffer's gradient is (old - new): the term added for it is zero, and an optimiser moves buffers with step one.
        That way batch-norm statistics follow whatever a method does with its models, with no second channel.
        """
        if isinstance(batch, Question):
            return batch.answer(self, model)
        if self.forward is None:
            logits = self.apply(model, batch["x"])
            moved: Model = {}
        else:
            logits, moved = self.forward(model, batch)
        return self.risk_of(logits, batch, model, moved)

    def risk_of(self, logits: Tensor, batch: Batch, model: Model, moved: Model) -> Tensor:
        """Return the risk of logits, with the terms that move the buffers to ``moved``."""
        loss = self.mean_loss(logits, batch)
        for name, new in moved.items():
            old = model[name]
            loss = loss + ((old - old.detach()) * (old.detach() - new.detach())).sum()
        return loss

    def mean_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss over a batch's real rows, or over their real positions."""
        return self.mean_over(self.example_loss(logits, batch["y"]), batch)

    def mean_over(self, values: Tensor, batch: Batch) -> Tensor:
        """Return the mean over a batch of one number per row, weighted by ``weigh``."""
        weight = self.weigh(batch)
        if weight is None:
            return values.mean()
        return (values * weight).sum() / weight.sum().clamp(min=SMALLEST if "weight" in batch else 1)

    def weigh(self, batch: Batch) -> Tensor | None:
        """Return each row's weight in a mean over the batch: 1 or its own, times its real positions; 0 if padded. None: all count
        alike."""
        mask = weights_of(batch)
        if not self.kind.per_position(batch["y"]):
            return mask
        count = self.kind.targets(batch["y"])
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
        packing: Packing | None = None,
    ) -> Task:
        """Make a task of any torch module; training starts from the module's present weights.

        ``loss`` is ``cross_entropy``, ``mse`` (half the squared error) or ``bce`` (several 0/1 labels). ``groups`` adds
        to or replaces the groups found by module (head, body, norm); ``blocks`` names the layers in order where the
        module is not an ``nn.Sequential`` (a tuple of names is one block). A module may declare both as attributes. With
        ``cross_entropy`` y has a label per row, or one per position [rows, positions] with -1 where a row is padded.

        ``packing`` is a federation's, where its rows have several parts: the module then gets the parts (``task/packing.py``).

        A module with the attribute ``channels_last = True`` says that it never calls ``view`` on a feature map; its
        convolutions then train faster in the loop engine.
        """
        kinds = {kind.loss: kind for kind in KINDS.values()}
        if loss not in kinds:
            raise InvalidArgument(f"unknown loss {loss!r}; use one of {', '.join(kinds)}")
        if not isinstance(module, nn.Module):
            raise InvalidArgument(f"a model must be a torch.nn.Module, not {type(module).__name__}")
        module, module_notes = plain_module(module)
        module_groups = _own(module, "groups", {})  # a convolution's `groups` is a number
        all_groups = {**(module_groups if isinstance(module_groups, Mapping) else {}), **(groups or {})}
        module_blocks = _own(module, "blocks", None)
        if blocks is None and isinstance(module_blocks, tuple):
            blocks = module_blocks
        task = _from_module(module, kinds[loss], all_groups, blocks, public, classes, packing)
        return replace(task, notes=(*module_notes, *task.notes)) if module_notes else task

    def check_fit(self, x: Tensor, y: Tensor, labels: int) -> None:
        """Raise ``ModelMismatch`` unless the model takes these rows and its output fits these labels."""
        try:
            with torch.no_grad():
                logits = self.apply(self.init(), x[:2].clone())  # it may write to what it is given
        except ModelMismatch:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelMismatch(
                f"the model does not take inputs of shape {tuple(x.shape[1:])} and type {x.dtype}: {first}; "
                "change the model's input layer or reshape the features"
            ) from error
        if not isinstance(logits, Tensor):
            raise ModelMismatch(
                f"the model's output is a {type(logits).__name__}, not a tensor; let its forward return only the logits"
            )
        if self.kind.softmax:
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
    kind: Kind,
    groups: Mapping[str, Sequence[str | nn.Module]] | None,
    blocks: Sequence[Part | Sequence[Part]] | None,
    public: Tensor | None,
    classes: int,
    packing: Packing | None = None,
) -> Task:
    declared_groups = named_groups(module, groups or {})  # before copying: modules are found by identity
    aliases = tied(module)
    chain = split_blocks(module, blocks) if packing is None else []  # a chain's first layer would be given packed rows
    notes = tuple(_own(module, "notes", ()))
    if aliases:
        one, other = next(iter(aliases.items()))
        notes = (*notes, f"{one} is {other}, tied: one parameter, which moves with the groups of both layers.")
        chain = [] if any(block.is_tied_outside(aliases) for block in chain) else chain
    frozen = frozen_names(module)
    state, names = _state(module)
    start = tree.drop(state, frozen)
    evaluator, trainer, frozen_tensors = copies(module, frozen)
    all_groups = {**default_groups(module, aliases), **declared_groups}
    head = _owner(all_groups["head"][0].removeprefix(BUFFER)) if all_groups.get("head") else None
    linear = packing is None and not frozen_tensors and (type(module) is nn.Linear or getattr(module, "is_linear_task", False))
    form = LinearForms(kind) if linear else None
    functions = _Functions(evaluator, trainer, names, draws(module), in_place_buffers(trainer), other_places(trainer))
    if packing is not None:
        functions = functions._replace(call=packing.call_of(module))
    task = Task(
        apply=linear_apply if form else functions.apply,
        example_loss=kind.example_loss,
        init=lambda: {name: value.clone() for name, value in start.items()},
        features=partial(functions.before, head) if head is not None else None,
        head=head,
        groups={group: _moving((aliases.get(name, name) for name in members), start) for group, members in all_groups.items()},
        blocks=tuple(block.bind(evaluator, trainer, start) for block in chain),
        public=public,
        classes=classes,
        kind=kind,
        forward=None if form else functions.forward,
        gradient=form.gradient if form else None,
        layered=None if form or packing or frozen_tensors or aliases else DenseForms.of(trainer, kind, functions.forward),
        frozen=frozen_tensors,
        channels_last=bool(_own(module, "channels_last", False)),
        row_bytes=int(_own(module, "row_bytes", 0)),
        notes=notes,
        trainer=trainer,
        clipped=form.clipped if form else None,
    )
    paths = [path for block in chain for path in block.path]
    cut = prefix_length(trainer, paths, frozen)
    return replace(task, prefix=_prefix(task, functions, paths, cut, head)) if cut else task


class _Functions(NamedTuple):
    """A module's two copies as functions of (model, x); parameters that the model does not name are the module's own."""

    evaluator: nn.Module
    trainer: nn.Module
    names: Mapping[str, str]  # from our names to torch's
    draws: bool = False  # the module may draw from torch's generator
    in_place: frozenset[str] = frozenset()  # buffers that the module may write to where they are
    places: Mapping[str, str] = {}  # second places of a parameter, with its name (both torch's)
    call: Call | None = None  # where rows have several parts: how they become arguments

    def apply(self, model: Model, x: Tensor) -> Tensor:
        state = {self.names[k]: v for k, v in model.items()}
        arguments = ((x,),) if self.call is None else self.call(x)
        return called(self.evaluator, state, self.places, *arguments)

    def forward(self, model: Model, batch: Batch) -> tuple[Tensor, Model]:
        state = {self.names[k]: v.detach().clone() if k in self.in_place else v for k, v in model.items()}
        key, row = batch.get("key"), batch.get("row")
        with batch_context(batch.get("mask"), key, row), keyed(key if self.draws and row is None else None, batch["x"].device):
            arguments = ((batch["x"],),) if self.call is None else self.call(batch["x"])
            logits = called(self.trainer, state, self.places, *arguments)
        return logits, {k: state[self.names[k]] for k in model if k.startswith(BUFFER)}

    def before(self, path: str, model: Model, x: Tensor) -> Tensor:
        """Return the input of the layer ``path``."""
        seen: list[Tensor] = []
        layer = self.evaluator.get_submodule(path)
        handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            self.apply(model, x)
        finally:
            handle.remove()
        return seen[-1]


def _prefix(task: Task, whole: _Functions, paths: Sequence[str], cut: int, head: str | None) -> Prefix:
    first, after = Segment(whole.evaluator, paths[:cut]), paths[cut:]
    rest = whole._replace(evaluator=Segment(whole.evaluator, after), trainer=Segment(whole.trainer, after))
    blocks = [replace(b, path=tuple(p for p in b.path if p in after)) for b in task.blocks]
    return Prefix(
        layers=tuple(paths[:cut]),
        apply=WithoutGradient(first),
        rest=replace(
            task,
            apply=rest.apply,
            forward=rest.forward,
            features=partial(rest.before, head) if head is not None else None,
            blocks=tuple(block for block in blocks if block.path),
        ),
    )


@dataclass(frozen=True, eq=False)
class WithoutGradient:
    """A module as a function through which no gradient flows."""

    module: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.module(x)


def _own(module: nn.Module, name: str, default: Any) -> Any:
    """Return an attribute that a module itself declares, not one that a wrapper passes on from its inner module."""
    declared = inspect.getattr_static(module, name, default)
    return getattr(module, name) if isinstance(declared, property) else declared


def _moving(names: Iterable[str], start: Model) -> tuple[str, ...]:
    """Return the names that are in the model, each once."""
    return tuple(dict.fromkeys(name for name in names if name in start))


def _owner(name: str) -> str:
    return name.rsplit(".", 1)[0] if "." in name else ""


def _state(module: nn.Module) -> tuple[Model, dict[str, str]]:
    """Return all parameters and statistics, and torch's name for each of our names. Integer buffers stay in the module."""
    start: dict[str, Tensor] = {k: v.detach().clone() for k, v in module.named_parameters()}
    names = {k: k for k in start}
    for name, value in module.named_buffers():
        if value.is_floating_point():
            start[BUFFER + name] = value.detach().clone()
            names[BUFFER + name] = name
    if not any(p.requires_grad for p in module.parameters()):
        raise InvalidArgument("the module has no parameters to train; give it a layer with weights (requires_grad=True)")
    return start, names
