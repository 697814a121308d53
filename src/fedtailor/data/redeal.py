"""Another split of the same rows: which of a client's rows train, test and validate, drawn anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.split import Split
from fedtailor.errors import InvalidArgument

Ints = NDArray[np.int64]


def redealt(federation: Federation, number: int, seed: int = 0) -> Federation:
    """Return the federation with every client's rows split anew, class by class; number 0 is the split that it came with.

    A client keeps as many training, test and validation rows as it has. Rows are drawn by (seed, number, client's name), so
    nobody else's rows matter. Features stay as they were made for the first split.
    """
    if number == 0:
        return federation
    if federation.train.weights is not None:
        raise InvalidArgument(
            "other splits would train on test rows, and these have no weights; leave splits= out, or the weights"
        )
    names = ("test", "train") if federation.val is None else ("test", "val", "train")
    splits: dict[str, Split] = {name: getattr(federation, name) for name in names}
    rows, owner, stratum = _pooled(federation, list(splits.values()))
    word = rng.mix(seed, rng.purpose("another split"), number, federation.keys[owner], _ranks(owner))
    order = _spread(owner, stratum, word, rng.mix(seed, number, federation.keys[owner], stratum))
    dealt, before = {}, np.zeros(len(federation), np.int64)
    starts = np.searchsorted(owner, np.arange(len(federation)))
    for name, split in splits.items():
        place = np.repeat(starts + before, split.sizes) + _ranks(np.repeat(np.arange(len(federation)), split.sizes))
        dealt[name] = rows[np.sort(order[place])]
        before += split.sizes
    x, y = (torch.cat([getattr(split, part) for split in splits.values()]) for part in ("x", "y"))
    marks = [split.kinds for split in splits.values()]
    kinds = None if any(mark is None for mark in marks) else torch.cat([mark for mark in marks if mark is not None])
    new = {
        name: Split(x[index], y[index], splits[name].offsets, None if kinds is None else kinds[index])
        for name, index in dealt.items()
    }
    return replace(federation, train=new["train"], test=new["test"], val=new.get("val"), recipe=None, refit=None)


def overlap(federation: Federation) -> float:
    """Return test rows over training rows: by how much the variance over splits of the same rows falls short."""
    return len(federation.test.y) / max(1, len(federation.train.y))


def _pooled(federation: Federation, splits: list[Split]) -> tuple[Ints, Ints, Ints]:
    """Return all rows by client: their places in the splits one after another, their clients and their classes."""
    owner = np.concatenate([np.repeat(np.arange(len(federation)), split.sizes) for split in splits])
    rows = np.argsort(owner, kind="stable")
    y = torch.cat([split.y for split in splits])
    classes = y.numpy().astype(np.int64) if federation.kind.softmax and y.dim() == 1 else np.zeros(len(owner), np.int64)
    return rows, owner[rows], classes[rows]


def _spread(owner: Ints, stratum: Ints, word: NDArray[np.uint64], shift: NDArray[np.uint64]) -> Ints:
    """Return the rows client by client, each class shuffled and laid out evenly: whatever is cut off has all classes' shares."""
    group = owner * (int(stratum.max(initial=0)) + 1) + stratum
    shuffled = np.lexsort((word, group))
    sizes = np.bincount(group)
    spot = (_ranks(group[shuffled]) + shift[shuffled] / 2.0**64) / sizes[group[shuffled]]
    return shuffled[np.lexsort((word[shuffled], spot, owner[shuffled]))]


def _ranks(codes: Ints) -> Ints:
    """Return 0, 1, ... within runs of equal codes, which are sorted."""
    starts = np.searchsorted(codes, codes)
    return np.arange(len(codes)) - starts
