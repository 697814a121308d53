"""The pieces of a plan: the task, the feed, the cohorts, the rounds (``engine.prepare`` puts them together)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedtailor import models, tree
from fedtailor.algorithms import origin
from fedtailor.algorithms.base import Algorithm
from fedtailor.data import rng
from fedtailor.data.augment import Augment
from fedtailor.data.federation import Federation
from fedtailor.data.feed import Feed, Paces
from fedtailor.data.secret import Secret
from fedtailor.engine.base import Ids, Plan
from fedtailor.engine.private import guarded
from fedtailor.errors import InvalidArgument
from fedtailor.models.factory import made_by
from fedtailor.server.cohort import sample
from fedtailor.task import Task
from fedtailor.task.own import copied, plain_module, with_dtype

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def build_task(
    model: str | nn.Module | Task | Callable[..., nn.Module],
    federation: Federation,
    seed: int,
    dtype: torch.dtype,
    bias: bool,
    backbone: str | os.PathLike[str] | None = None,
) -> Task:
    """Return the task for a model (a name, started from the weights ``backbone``; a module, or a function that makes one; a
    task), checked against the data."""
    model = named_model(model)
    if backbone is not None and (not isinstance(model, str) or origin.is_spec(model)):
        raise InvalidArgument("backbone= is for a network given by name; load the weights into your module instead")
    if isinstance(model, Task):
        if any(t.is_floating_point() and t.dtype != dtype for t in model.frozen.values()):
            have, name = (str(t).removeprefix("torch.") for t in (next(iter(model.frozen.values())).dtype, dtype))
            raise InvalidArgument(
                f"the task's frozen part is {have} and the run {name}; pass dtype={have!r}, or the module itself"
            )
        made = replace(model, init=lambda: tree.map(lambda t: t.to(dtype) if t.is_floating_point() else t, model.init()))
    else:
        notes: tuple[str, ...] = ()
        packing = None if isinstance(model, str) and not origin.is_spec(model) else federation.packing
        network = made_module(model, federation, seed)
        if isinstance(network, str):
            _check_parts(network, federation)
            shape = tuple(federation.train.x.shape[1:])
            words, sequences = federation.tokens, federation.per_position
            options: dict[str, Any] = {"tokens": words, "per_position": sequences, "backbone": backbone}
            module = models.build(network, shape, federation.outputs, seed=seed, bias=bias, **options)
        elif isinstance(network, nn.Module):
            written, notes = plain_module(network)
            module = copied(written)
        else:
            raise InvalidArgument(
                f"model must be a name, a torch.nn.Module, a function that makes one, or a Task, not {type(network).__name__}"
            )
        made = Task.from_module(with_dtype(module, dtype), federation.kind.loss, classes=federation.labels, packing=packing)
        made = replace(made, notes=(*notes, *made.notes))
    if made.kind != federation.kind:
        raise InvalidArgument(
            f"the task's loss is for {made.kind} but the data are for {federation.kind}; pass task={made.kind!r} or another loss"
        )
    if made.public is None and federation.public is not None:
        made = replace(made, public=federation.public)
    if federation.vocabulary is not None and federation.vocabulary.unknown is not None:
        made = replace(made, unscored=federation.vocabulary.unknown)
    made = replace(made, inputs=federation.train.x[:0].clone(), seed=seed, clients=len(federation))
    made.check_fit(*federation.few(2), federation.labels)
    return made


def made_module(model: Any, federation: Federation, seed: int) -> Any:
    """Return the module that a function of the user's makes; other models as they are."""
    if not isinstance(model, str) or not origin.is_spec(model):
        return model
    shape = tuple(federation.train.x.shape[1:]) if federation.packing is None else federation.packing.shapes
    return made_by(origin.function_of(model), origin.name_of(model), shape, federation.outputs, seed, federation.names)


def check_bias(model: Any, bias: bool) -> None:
    """Refuse to leave the constant term out of a network that is not linear: it would be there all the same."""
    if bias or isinstance(model, Task) or (isinstance(model, str) and model.partition(":")[0] in ("linear", "split-linear")):
        return
    name = repr(model) if isinstance(model, str) else type(model).__name__
    raise InvalidArgument(
        f"bias=False is for the model 'linear', not for {name}; leave bias out, or build your module without it"
    )


def _check_parts(model: str, federation: Federation) -> None:
    """Refuse a network of ours on rows with a part that does not hold quantities: ours see one row of numbers."""
    for part in () if federation.packing is None else federation.packing.parts:
        if part.type == "int":
            raise InvalidArgument(
                f"rows have a part {part.name!r} of whole numbers, which the model {model!r} would take for quantities; "
                "give a module of your own"
            )


def named_model(model: Any) -> Any:
    """Return a function that makes modules as words that hold where it is and its fingerprint; other models as they are."""
    is_factory = callable(model) and not isinstance(model, (nn.Module, Task))
    is_word = isinstance(model, str) and origin.is_spec(model)
    return origin.specs_of(model, False) if is_factory or is_word else model


def make_plan(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    batch_size: int | None,
    seed: int,
    weights: str,
    secret: Secret | None = None,
    augment: Augment | None = None,
    paces: Paces | None = None,
) -> Plan:
    """Return the plan of a run; where the method is private, its noise comes from ``secret`` (None: a fresh one)."""
    sizes = federation.train.sizes
    share = sizes / sizes.sum() if weights == "size" else np.full(len(federation), 1 / len(federation))
    feed = Feed(federation, algorithm.work(), batch_size, seed, augment=augment, paces=paces)
    return guarded(Plan(algorithm, task, federation, feed, share), secret)


def visits_of(plan: Plan, rounds: int, size: int) -> NDArray[np.int64]:
    """Return in how many rounds each client looks at its rows."""
    out = np.zeros(len(plan.federation), np.int64)
    for number in range(rounds):
        ids = drawn(plan, size, number)
        if plan.algorithm.looks(plan.round(number, rounds, ids)):
            out[ids] += 1
    return out


def drawn(plan: Plan, size: int, number: int) -> Ids:
    """Return the clients of a round: ``size`` of them; where whole clients are private, each drawn by itself; or whom the user's
    own function or table names."""
    if plan.attendance is not None and not (plan.algorithm.roll_call and number == 0):
        return plan.attendance(number)[0]
    if plan.crowd is None or (plan.algorithm.roll_call and number == 0):
        return cohort_of(plan.federation, plan.algorithm, size, plan.feed.seed, number)
    ids = np.flatnonzero(plan.crowd.drawn(plan.federation.keys, number))
    return ids if len(ids) else plan.federation.order[:1]  # nobody: one client works, and its upload counts for nothing


def cohort_of(federation: Federation, algorithm: Algorithm, size: int, seed: int, number: int) -> Ids:
    if algorithm.roll_call and number == 0:
        return np.arange(len(federation))
    return federation.order[sample(len(federation), size, seed, number)]


def evaluated_clients(plan: Plan, count: int | None) -> Ids | None:
    """Return ``count`` clients to measure between the rounds, drawn by name; None: all."""
    if count is None or count >= len(plan.federation):
        return None
    keys = plan.federation.keys
    words = rng.mix(plan.feed.seed, rng.purpose("evaluated clients"), keys)
    return np.sort(np.lexsort((keys, words))[:count])
