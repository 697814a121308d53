"""Another split of the same rows: which of a client's rows train, test and validate, drawn anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    nobody else's rows matter. Columns of a table are fitted to the new training rows (see ``fits_anew``).
    """
    if number == 0:
        return federation
    pool = _Pool.of(federation, (seed, rng.purpose("another split"), number), (seed, number))
    sizes = [split.sizes for split in pool.splits.values()]
    return pool.dealt(federation, np.zeros(len(federation), np.int64), sizes)


def pooled(federation: Federation, name: str = "everyone") -> Federation:
    """Return the rows of all clients as those of one, called ``name``."""

    def join(split: Split) -> Split:
        return replace(split, offsets=np.array([0, len(split.y)]))

    return replace(
        federation,
        train=join(federation.train),
        test=join(federation.test),
        val=None if federation.val is None else join(federation.val),
        names=(name,),
        truth=None,
        facts={},
    )


def folded(federation: Federation, number: int, folds: int, seed: int = 0) -> Federation:
    """Return the federation in which the fold of this number, counted from 0, tests: over all of them every row tests once.

    Classes are spread over the folds. Of the other rows as large a share validates as did before.
    """
    pool = _Pool.of(federation, (seed, rng.purpose("folds"), folds), (seed, folds))
    rows = pool.counts
    if small := [federation.names[i] for i in np.flatnonzero(rows < folds + len(pool.splits) - 2)]:
        raise InvalidArgument(
            f"{folds} folds need as many rows of every client, and one more to train on; {', '.join(small[:5])} "
            f"{'has' if len(small) == 1 else 'have'} fewer: use fewer folds, or --min-samples {folds + 1}"
        )
    first, last = rows * number // folds, rows * (number + 1) // folds
    rest = rows - (last - first)
    sizes = [last - first, rest]
    if federation.val is not None:
        share = federation.val.sizes / (federation.val.sizes + federation.train.sizes)
        val = np.clip(np.rint(rest * share).astype(np.int64), 1, rest - 1)
        sizes = [last - first, val, rest - val]
    return pool.dealt(federation, first, sizes)


def fits_anew(federation: Federation) -> bool:
    """Return whether other splits scale and fill columns by their own training rows; without, features stay as they are."""
    return federation.refit is not None and federation.refit.knows(federation)


@dataclass(frozen=True)
class _Pool:
    """All rows of a federation, client after client and each class spread evenly: ``order`` has their places in its splits, one
    after another."""

    splits: dict[str, Split]
    order: Ints
    starts: Ints
    counts: Ints

    @staticmethod
    def of(federation: Federation, key: Sequence[int], shift: Sequence[int]) -> _Pool:
        names = ("test", "train") if federation.val is None else ("test", "val", "train")
        splits: dict[str, Split] = {name: getattr(federation, name) for name in names}
        rows, owner, stratum = _pooled(federation, list(splits.values()))
        word = rng.mix(*key, federation.keys[owner], _ranks(owner))
        order = rows[_spread(owner, stratum, word, rng.mix(*shift, federation.keys[owner], stratum))]
        return _Pool(splits, order, np.searchsorted(owner, np.arange(len(federation))), np.bincount(owner))

    def dealt(self, federation: Federation, first: Ints, sizes: Sequence[Ints]) -> Federation:
        """Return the federation whose parts are ``sizes`` of every client's rows, one after another from its ``first`` on; after
        the last comes the first."""
        chosen, before = {}, first
        for name, size in zip(self.splits, sizes, strict=True):
            owner = np.repeat(np.arange(len(size)), size)
            place = (before[owner] + _ranks(owner)) % self.counts[owner]
            picked = self.order[self.starts[owner] + place]
            chosen[name] = (picked[np.lexsort((picked, owner))], np.concatenate([[0], np.cumsum(size)]))
            before = before + size
        return self._anew(federation, chosen) if fits_anew(federation) else self._same(federation, chosen)

    def _anew(self, federation: Federation, chosen: Mapping[str, tuple[Ints, Ints]]) -> Federation:
        """Return the table read again with these rows in these parts."""
        rows = np.concatenate([split.rows for split in self.splits.values() if split.rows is not None])
        parts = np.zeros(int(rows.max()) + 1, np.int8)
        for number, name in enumerate(("train", "test", "val")):
            if name in chosen:
                parts[rows[chosen[name][0]]] = number
        assert federation.refit is not None
        new = federation.refit.split(parts)
        parts_of = {"train": new.train, "test": new.test, "val": new.val}
        return replace(federation, **parts_of, schema=new.schema, recipe=None, refit=new.refit)

    def _same(self, federation: Federation, chosen: Mapping[str, tuple[Ints, Ints]]) -> Federation:
        """Return the same rows of features in these parts."""
        if federation.train.weights is not None:
            raise InvalidArgument(
                "other splits would train on test rows, and these have no weights; leave splits= out, or the weights"
            )
        x, y = (torch.cat([getattr(split, part) for split in self.splits.values()]) for part in ("x", "y"))
        marks = [split.kinds for split in self.splits.values()]
        kinds = None if any(mark is None for mark in marks) else torch.cat([mark for mark in marks if mark is not None])
        new = {
            name: Split(x[index], y[index], offsets, None if kinds is None else kinds[index])
            for name, (index, offsets) in chosen.items()
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
