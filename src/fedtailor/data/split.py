"""Split: the rows of all clients in one array, and where each client's begin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of all clients, one after another: x [rows, ...], y [rows], [rows, outputs] or [rows, positions], offsets
    [clients + 1].

    ``kinds`` [rows] says which rows follow the law of all clients, where rows were generated from two laws (see ``instances``).
    ``weights`` [rows] is how much each row counts in the loss (None: all alike). ``rows`` [rows] are the rows of the table that
    they came from, counted from 0.
    """

    x: Tensor
    y: Tensor
    offsets: NDArray[np.int64]
    kinds: Tensor | None = None
    weights: Tensor | None = None
    rows: NDArray[np.int64] | None = None

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        """Return (x, y) of the i-th client, counted from 0."""
        if not -len(self.sizes) <= i < len(self.sizes):
            raise InvalidArgument(f"no client {i}; there are {len(self.sizes)}, counted from 0")
        i %= len(self.sizes)
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.x[rows], self.y[rows]

    def take(self, clients: NDArray[np.int64]) -> Split:
        chosen = np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in clients])
        index = torch.from_numpy(chosen)
        kinds, weights = (None if each is None else each[index] for each in (self.kinds, self.weights))
        rows, offsets = None if self.rows is None else self.rows[chosen], np.concatenate([[0], np.cumsum(self.sizes[clients])])
        return Split(self.x[index], self.y[index], offsets, kinds, weights, rows)
