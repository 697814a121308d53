"""How often a comparison is repeated: over seeds of training, and over splits of the clients' rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fedtailor.errors import InvalidArgument

MOST = 1000
SPLITS = f'must be a whole number from 1 to {MOST}, or as "5-fold" (2 or more), in which every row tests once'


@dataclass(frozen=True)
class Repeats:
    """So many seeds, on so many splits of the rows; with ``folds`` the splits are folds, so that every row tests once."""

    seed: int
    seeds: int = 1
    splits: int = 1
    folds: bool = False

    @property
    def all_seeds(self) -> range:
        return range(self.seed, self.seed + self.seeds)


def splits_of(asked: Any) -> tuple[int, bool]:
    """Return the number of splits that ``splits=10`` or ``splits="5-fold"`` asks for, and whether they are folds."""
    words = re.fullmatch(r"\s*(\d{1,9})\s*(?:-?\s*(folds?))?\s*", str(asked))
    count, folds = (int(words[1]), bool(words[2])) if words else (0, False)
    if isinstance(asked, bool) or not (2 if folds else 1) <= count <= MOST:
        raise InvalidArgument(f"splits {SPLITS}, not {asked!r}")
    return count, folds
