"""Store: the personal state of all clients, one row each, in memory or in memory-mapped files.

Space for every client is reserved, but the system hands out memory (or disk) only for rows that were written, so clients
that never took part cost nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree


class Store:
    def __init__(self, clients: int, folder: Path | None = None) -> None:
        self.clients, self.folder = clients, folder
        self.born = np.zeros(clients, bool)
        self._rows: Any = None

    def put(self, ids: NDArray[np.int64], personal: Any) -> None:
        """Write rows; leaves of ``personal`` are [len(ids), ...]."""
        if self._rows is None:
            self._rows = {path: self._space(path, leaf) for path, leaf in tree.items(personal)}
            self._shape = tree.map(lambda _: None, personal)
        index = torch.from_numpy(ids)
        for path, leaf in tree.items(personal):
            self._rows[path].index_copy_(0, index, leaf.detach().to("cpu"))
        self.born[ids] = True

    def get(self, ids: NDArray[np.int64]) -> Any:
        """Rows of clients that were written before, leaves [len(ids), ...] (copies)."""
        index = torch.from_numpy(ids)
        return tree.refill(self._shape, iter(rows.index_select(0, index) for rows in self._rows.values()))

    def dump(self) -> Any:
        """The state of all clients that were written, as one tree."""
        ids = np.flatnonzero(self.born)
        return {"ids": torch.from_numpy(ids), "rows": self.get(ids) if self._rows is not None else {}}

    def fill(self, dumped: Any) -> None:
        """Take back what ``dump`` gave."""
        if len(dumped["ids"]):
            self.put(dumped["ids"].numpy(), dumped["rows"])

    def _space(self, path: str, leaf: Tensor) -> Tensor:
        shape = (self.clients, *leaf.shape[1:])
        if self.folder is None:
            return torch.empty(shape, dtype=leaf.dtype)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / (path.replace("/", "__").replace(":", "_") + ".bin")
        numbers = int(np.prod(shape))
        return (
            torch.from_file(str(file), shared=True, size=numbers, dtype=leaf.dtype).view(shape) if numbers else torch.empty(shape)
        )
