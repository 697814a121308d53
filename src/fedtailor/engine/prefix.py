"""Frozen first layers: their output is computed once for every row, and training goes on from there.

A row gives the same output whenever it is seen (frozen weights, frozen statistics, no dropout), so nothing changes but the
time, and the last digits where a convolution sums in another order for batches of another size. What is saved is the
forward pass of these layers; what it costs is the memory of their output.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.data.federation import Federation, Split
from fedtailor.runs.config import fingerprint
from fedtailor.task import Task

ROOM = 1 << 30  # bytes that the outputs may take; beyond, every batch goes through all layers
CHUNK = 256  # rows at once
_made: WeakValueDictionary[tuple[str, str], Split] = WeakValueDictionary()  # while one run holds them, others use them too


def after_prefix(task: Task, federation: Federation) -> tuple[Task, Federation, tuple[str, ...]]:
    """(the task of the layers that follow, the federation of their inputs, a note); as given where there is nothing to save."""
    prefix = task.prefix
    if prefix is None:
        return task, federation, ()
    splits = [s for s in (federation.train, federation.test, federation.val) if s is not None]
    one = prefix.apply(splits[0].x[:1])
    rows = sum(len(s.x) for s in splits) + (0 if task.public is None else len(task.public))
    size = rows * one.numel() * one.element_size()
    layers = f"{len(prefix.layers)} frozen layers (to {prefix.layers[-1]})"
    if size > ROOM:
        return task, federation, (f"The output of the first {layers} would take {size / 1e9:.1f} GB and was not kept.",)
    rest = replace(prefix.rest, init=task.init, public=None if task.public is None else through(task, task.public))
    key = _key(task, federation)
    new: dict[str, Split] = {}
    for what in ("train", "test", "val"):
        split = getattr(federation, what)
        if split is not None:
            new[what] = _made.get((key, what)) or Split(through(task, split.x), split.y, split.offsets)
            _made[key, what] = new[what]
    features = replace(federation, **new, public=rest.public)  # type: ignore[arg-type]
    return rest, features, (f"The first {layers} were computed once for every row.",)


def _key(task: Task, federation: Federation) -> str:
    assert task.prefix is not None
    held = hashlib.sha256(tree.pack(task.held)).hexdigest()
    return f"{fingerprint(federation)} {held} {task.prefix.apply} {task.prefix.layers}"


def through(task: Task, x: Tensor) -> Tensor:
    """Rows as they leave the frozen first layers."""
    assert task.prefix is not None
    return torch.cat([task.prefix.apply(part) for part in x.split(CHUNK)]) if len(x) else x
