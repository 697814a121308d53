"""From ``run``'s arguments to a plan: checked, the task built, the cohorts drawn."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedtailor import models, tree
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.data import rng, shift
from fedtailor.data.federation import Federation
from fedtailor.data.feed import Feed
from fedtailor.engine.base import Ids, Plan
from fedtailor.engine.private import guarded, settled
from fedtailor.errors import InvalidArgument
from fedtailor.local import Private
from fedtailor.server.cohort import sample
from fedtailor.task import Task
from fedtailor.task.losses import BY_KIND

ENGINES = ("auto", "loop", "vectorized")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def build_task(
    model: str | nn.Module | Task,
    federation: Federation,
    seed: int,
    dtype: torch.dtype,
    bias: bool,
    backbone: str | os.PathLike[str] | None = None,
) -> Task:
    """The task for a model given by name (``backbone``: started from these weights), as a module or as a task, checked against
    the data."""
    if backbone is not None and not isinstance(model, str):
        raise InvalidArgument("backbone= is for a network given by name; load the weights into your module instead")
    if isinstance(model, Task):
        if any(t.is_floating_point() and t.dtype != dtype for t in model.held.values()):
            have, name = (str(t).removeprefix("torch.") for t in (next(iter(model.held.values())).dtype, dtype))
            raise InvalidArgument(
                f"the task's frozen part is {have} and the run {name}; pass dtype={have!r}, or the module itself"
            )
        made = replace(model, init=lambda: tree.map(lambda t: t.to(dtype) if t.is_floating_point() else t, model.init()))
    else:
        if isinstance(model, str):
            shape = tuple(federation.train.x.shape[1:])
            words, sequences = federation.tokens, federation.per_position
            options: dict[str, Any] = {"tokens": words, "per_position": sequences, "backbone": backbone}
            module = models.build(model, shape, federation.outputs, seed=seed, bias=bias, **options)
        elif isinstance(model, nn.Module):
            module = copy.deepcopy(model)
        else:
            raise InvalidArgument(f"model must be a name, a torch.nn.Module or a Task, not {type(model).__name__}")
        made = Task.from_module(module.to(dtype), BY_KIND[federation.kind].name, classes=federation.labels)
    if made.kind != federation.kind:
        raise InvalidArgument(
            f"the task's loss is for {made.kind} but the data are for {federation.kind}; pass task={made.kind!r} or another loss"
        )
    if made.public is None and federation.public is not None:
        made = replace(made, public=federation.public)
    if federation.vocabulary is not None and federation.vocabulary.unknown is not None:
        made = replace(made, unscored=federation.vocabulary.unknown)
    made = replace(made, inputs=federation.train.x[:0].clone(), seed=seed)
    made.check_fit(federation.train.x, federation.train.y, federation.labels)
    return made


def make_plan(algorithm: Algorithm, task: Task, federation: Federation, batch_size: int | None, seed: int, weights: str) -> Plan:
    sizes = federation.train.sizes
    share = sizes / sizes.sum() if weights == "size" else np.full(len(federation), 1 / len(federation))
    return guarded(Plan(algorithm, task, federation, Feed(federation, algorithm.work(), batch_size, seed), share))


def visits_of(plan: Plan, rounds: int, size: int) -> NDArray[np.int64]:
    """In how many rounds each client looks at its rows."""
    plays = Round(rounds=rounds, clients=len(plan.federation), seed=plan.feed.seed)
    out = np.zeros(len(plan.federation), np.int64)
    for number in range(rounds):
        if plan.algorithm.looks(replace(plays, number=number)):
            out[cohort_of(plan.federation, plan.algorithm, size, plan.feed.seed, number)] += 1
    return out


def privatized(
    algorithm: Algorithm, task: Task, federation: Federation, rounds: int, size: int, batch_size: int | None, seed: int
) -> Algorithm:
    """A private method that asks for an epsilon, with the noise for it; any other as it is."""
    if not isinstance(algorithm.opt, Private) or algorithm.opt.target_epsilon is None:
        return algorithm
    plan = make_plan(algorithm, task, federation, batch_size, seed, "uniform")
    return settled(algorithm, plan, visits_of(plan, rounds, size))


def cohort_of(federation: Federation, algorithm: Algorithm, size: int, seed: int, number: int) -> Ids:
    if algorithm.roll_call and number == 0:
        return np.arange(len(federation))
    return federation.order[sample(len(federation), size, seed, number)]


def round_of(number: int, rounds: int, plan: Plan, ids: Ids) -> Round:
    clients = len(plan.federation)
    mass = clients / len(ids) * float(plan.weights[ids].sum()) if len(ids) < clients else 1.0
    cohort = plan.weights[ids[np.argsort(plan.federation.keys[ids], kind="stable")]]  # in the order uploads are stacked
    return Round(number, rounds, clients, len(ids), mass, torch.from_numpy(cohort / cohort.sum()), plan.feed.seed)


def newcomers_of(federation: Federation, share: float, seed: int) -> Ids | None:
    if share == 0:
        return None
    count = max(1, round(share * len(federation)))
    if count >= len(federation):
        raise InvalidArgument(f"new_clients={share} leaves none of the {len(federation)} clients to train on; use less")
    drawn = rng.generator(seed, "new clients").choice(len(federation), count, replace=False)
    return np.sort(federation.order[drawn])


def check_shift(specs: Sequence[str], federation: Federation) -> None:
    """Refuse corruptions that are unknown, or of rows that are no images, before anything is trained."""
    for spec in specs:
        if spec != shift.CIFAR10_1:
            shift.corrupted(federation.test.x[:1], *shift.parse(spec))


def check(
    algorithm: Any,
    federation: Any,
    rounds: Any,
    batch_size: Any,
    seed: Any,
    engine: Any,
    workers: Any,
    dtype: Any,
    weights: Any,
    evaluate_every: Any,
    new_clients: Any,
    device: Any,
) -> None:
    if not isinstance(algorithm, Algorithm):
        hint = "; create it first, for instance ft.FedAvg()" if isinstance(algorithm, type) else ""
        raise InvalidArgument(f"algorithm must be an Algorithm, not {algorithm!r}{hint}")
    if not isinstance(federation, Federation):
        raise InvalidArgument(f"federation must be a Federation (see Federation.from_arrays), not {type(federation).__name__}")
    for name, value, least in (
        ("rounds", rounds, 1),
        ("batch_size", batch_size, 1),
        ("workers", workers, 1),
        ("evaluate_every", evaluate_every, 0),
        ("seed", seed, 0),
    ):
        if value is None and name in ("batch_size", "workers", "evaluate_every"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise InvalidArgument(f"{name} must be a whole number of at least {least}, not {value!r}")
        if value >= 2**63:
            raise InvalidArgument(f"{name} must be below 2^63, not {value!r}")
    for name, value, known in (
        ("engine", engine, ENGINES),
        ("dtype", dtype, tuple(DTYPES)),
        ("weights", weights, ("uniform", "size")),
        ("device", device, ("cpu",)),
    ):
        if value not in known:
            raise InvalidArgument(f"{name} must be one of {', '.join(known)}, not {value!r}")
    if not isinstance(new_clients, (int, float)) or not 0 <= new_clients < 1:
        raise InvalidArgument(f"new_clients must be a share in [0, 1), not {new_clients!r}")
