"""Columns fitted anew: to the training rows of some clients only, or of another split of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.split import Split

Federation = Any  # which has a Refit itself
Parts = NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Refit:
    """Reads a table again: ``read`` takes the names of the clients whose training rows count (None: all), and the part (0 train,
    1 test, 2 val) of every row of the table (None: as the table is split). ``parts`` are the splits as they were read first: by
    them it is known which of a federation's splits is which."""

    read: Callable[[frozenset[str] | None, Parts | None], Federation]
    parts: tuple[Split | None, ...]  # train, test, val
    _last: dict[frozenset[str], tuple[Federation, dict[int, Split]]] = field(default_factory=dict)

    def __call__(self, clients: Sequence[str]) -> tuple[Federation, dict[int, Split]]:
        """Return the federation fitted to these clients, and its splits by the id of the first ones; the last is remembered."""
        names = frozenset(clients)
        if names not in self._last:
            new = self.read(names, None)
            self._last.clear()
            pairs = zip(self.parts, (new.train, new.test, new.val), strict=True)
            self._last[names] = new, {id(old): split for old, split in pairs if old is not None and split is not None}
        return self._last[names]

    def knows(self, federation: Federation) -> bool:
        """Return whether the rows of a federation are as they were read first."""
        return (federation.train, federation.test, federation.val) == self.parts

    def split(self, parts: Parts) -> Federation:
        """Return the federation read again with its rows in these parts, able to be fitted to some clients as well."""
        return refittable(lambda clients, other: self.read(clients, parts if other is None else other))


def refittable(read: Callable[[frozenset[str] | None, Parts | None], Federation]) -> Federation:
    """Return what ``read`` gives with all clients, able to be fitted to some of them, or to another split."""
    whole = read(None, None)
    return replace(whole, refit=Refit(read, (whole.train, whole.test, whole.val)))
