"""Runs whose clients have different networks (``models/mixed.py``): rows say which, and models never travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.data.federation import Federation
from fedtailor.data.split import Split
from fedtailor.engine.base import Ids, Plan
from fedtailor.errors import InvalidArgument
from fedtailor.models.mixed import Mixed
from fedtailor.models.several import is_several, several
from fedtailor.task.layers import keyed
from fedtailor.task.packing import ARCHITECTURE, Packing, Part


def mixed_of(model: Any, federation: Federation, seed: int) -> Mixed | None:
    """Return the clients' different networks, given as a module or by name; None: all have the same."""
    if is_several(model):
        if federation.tokens or federation.packing is not None:
            raise InvalidArgument(f"the model {model!r} reads rows of numbers; give ft.Mixed with modules of your own in Python")
        return several(model, tuple(federation.train.x.shape[1:]), federation.outputs, federation.names, seed)
    return model if isinstance(model, Mixed) else None


def with_architectures(federation: Federation, model: Mixed) -> Federation:
    """Return the federation, every row with the number of its client's body as its last part."""
    if federation.tokens or (federation.packing is not None and not federation.packing.named):
        raise InvalidArgument("Mixed: rows must be numbers, or a dict of parts (x={'ids': ...}), so that a part can be added")
    before = federation.packing or Packing((Part("x", tuple(federation.train.x.shape[1:]), "float"),), True, bare=True)
    packing = replace(before, parts=(*before.parts, Part(ARCHITECTURE, (), "int")))
    numbers = np.array([model.number_of(name) for name in federation.names])

    def wide(x: Tensor, numbers: Any) -> Tensor:
        return torch.cat([x.flatten(1), torch.as_tensor(numbers).to(x).view(-1, 1)], 1)

    def split(one: Split | None) -> Split | None:
        return None if one is None else replace(one, x=wide(one.x, np.repeat(numbers, one.sizes)))

    public = None if federation.public is None else wide(federation.public, np.zeros(len(federation.public)))
    parts: dict[str, Any] = {name: split(getattr(federation, name)) for name in ("train", "test", "val")}
    return replace(federation, **parts, public=public, packing=packing)


def by_architecture(federation: Federation, ids: Ids, x: Tensor) -> Iterator[tuple[Ids, Tensor]]:
    """Yield clients and rows ``x`` as these clients' own: all at once, unless rows say which network their client has."""
    if federation.packing is None or not federation.packing.mixed:
        yield ids, x
        return
    numbers = federation.train.x[torch.from_numpy(federation.train.offsets[:-1])][:, -1].cpu().numpy()[ids]
    for number in np.unique(numbers):
        yield ids[numbers == number], torch.cat([x[:, :-1], x.new_full((len(x), 1), float(number))], 1)


def check_mixed(plan: Plan, model: Mixed) -> None:
    """Refuse bodies that do not fit rows or head, and a method that sends models, down or up: there is no mean of different
    networks."""
    task, algorithm, train = plan.task, plan.algorithm, plan.federation.train
    for number in range(len(model.bodies)):
        rows = torch.cat([train.x[:2, :-1], train.x.new_full((len(train.x[:2]), 1), float(number))], 1)
        task.check_fit(rows, train.y, plan.federation.labels)
    names = set(task.names)
    with keyed(plan.key("start", 0)):
        shared, server = algorithm.init_server(task)
        rnd = plan.round(0, 2, np.arange(len(plan.federation)))
        received = plan.sent(shared, server, rnd).to(0)
        _refuse(algorithm, received, names)
        feed = plan.feed.like({phase: work.taking(1) for phase, work in plan.feed.phases.items()})
        personal = algorithm.init_client(task, received, feed.one(0, 0))
        upload, _ = algorithm.client_update(task, received, personal, feed.one(0, 0), rnd)
    _refuse(algorithm, upload, names)


def _refuse(algorithm: Any, message: Any, names: set[str]) -> None:
    for path, _ in tree.items(message):
        if path in names or any(path.endswith(f"/{name}") for name in names):
            raise InvalidArgument(
                f"{type(algorithm).__name__} sends models, and these clients have different ones, of which there is no mean; use "
                "a method that leaves models at home (Local, FedProto, or one of your own that sends logits)"
            )
