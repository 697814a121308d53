"""Frozen first layers: their output is computed once for every row, and training goes on from there.

A row gives the same output whenever it is seen (frozen weights, frozen statistics, no dropout), so nothing changes but the
time, and the last digits where a convolution sums in another order for batches of another size. What is saved is the
forward pass of these layers; what it costs is the memory of their output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.data.federation import Federation
from fedtailor.data.split import Split
from fedtailor.task import Task
from fedtailor.task.device import CPU
from fedtailor.task.placed import placed
from fedtailor.tree import BUFFER

ROOM = 1 << 30  # bytes that the outputs may take; beyond, every batch goes through all layers
CHUNK = 256  # rows at once
_made: MutableMapping[str, Tensor] = WeakValueDictionary()  # while one run holds them, others use them too


def after_prefix(task: Task, federation: Federation, device: torch.device = CPU) -> tuple[Task, Federation, tuple[str, ...]]:
    """Return (task of the layers that follow, federation of their inputs, a note); unchanged where nothing is saved.

    The outputs are computed on ``device`` and kept on the CPU.
    """
    prefix = task.prefix
    if prefix is None or federation.tokens:  # of tokens they are an embedding: a lookup, whose output is larger than the rows
        return task, federation, ()
    splits = [s for s in (federation.train, federation.test, federation.val) if s is not None]
    one = prefix.apply(splits[0].x[:1].clone())
    rows = sum(len(s.x) for s in splits) + (0 if task.public is None else len(task.public))
    size = rows * one.numel() * one.element_size()
    layers = f"{len(prefix.layers)} frozen layers (to {prefix.layers[-1]})"
    if size > ROOM:
        return task, federation, (f"The output of the first {layers} would take {size / 1e9:.1f} GB and was not kept.",)
    apply = _on(task, device)
    public = None if task.public is None else apply(task.public)
    new = {split: _split(getattr(federation, split), apply) for split in ("train", "test", "val")}
    features = replace(federation, **new, public=public)  # type: ignore[arg-type]
    note = f"The first {layers} were computed once for every row."
    inputs = features.train.x[:0].clone()
    rest = replace(prefix.rest, init=task.init, public=public, inputs=inputs)
    rest = replace(rest, unscored=task.unscored, seed=task.seed, clients=task.clients)
    rest = replace(rest, example_loss=task.example_loss, metrics=task.metrics, lead=task.lead)
    return rest, features, (note,)


@contextmanager
def keep_outputs() -> Iterator[None]:
    """Keep outputs for the runs that follow; outside this context they go with the last run that uses them."""
    global _made
    before, _made = _made, dict(_made)
    try:
        yield
    finally:
        _made = before


def through(task: Task, x: Tensor, device: torch.device = CPU) -> Tensor:
    """Return rows as they leave the frozen first layers, computed on ``device``."""
    return _on(task, device)(x)


def _on(task: Task, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the first layers as a function from rows to outputs, both on the CPU; what was computed before is not again."""
    prefix, key = placed(task, device).prefix, f"{_key(task)} {device}"
    assert prefix is not None

    def layers(part: Tensor) -> Tensor:
        return prefix.apply(part.to(device, copy=True)).cpu()  # a layer may write to what it is given

    def apply(x: Tensor) -> Tensor:
        rows = f"{key} {tuple(x.shape)} {x.dtype} {hashlib.sha256(x.contiguous().numpy().data).hexdigest()}"
        output = _made.get(rows)
        if output is None:
            output = torch.cat([layers(part) for part in x.split(CHUNK)]) if len(x) else x
            _made[rows] = output
        return output

    return apply


def _key(task: Task) -> str:
    """Return a key for what the outputs depend on beside the rows."""
    assert task.prefix is not None
    starts = tuple(f"{start}{path}." if path else "" for path in task.prefix.layers for start in ("", BUFFER))
    weights = {name: value for name, value in task.frozen.items() if name.startswith(starts)}
    return f"{task.prefix.apply} {hashlib.sha256(tree.pack(weights)).hexdigest()}"


def _split(split: Split | None, apply: Callable[[Tensor], Tensor]) -> Split | None:
    return None if split is None else replace(split, x=apply(split.x))
