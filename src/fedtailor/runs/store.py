"""Store: the personal state of all clients, one row each, in memory, in memory-mapped files or on a device.

Space for every client is reserved, but the system hands out memory (or disk) only for rows that were written, so clients
that never took part cost nothing. A device hands it out at once: there the rows of all clients must fit into a part of what is
free, or they stay in the computer's memory and are copied to and fro.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.task.device import CPU, backend, moved, size

SHARE = 0.25  # of a device's free memory


class Store:
    def __init__(self, clients: int, folder: Path | None = None, device: torch.device = CPU) -> None:
        self.clients, self.folder, self.device = clients, folder, device
        self._home = CPU  # where the rows are
        self.born = np.zeros(clients, bool)
        self.changed = np.zeros(clients, bool)  # since whoever keeps the rows elsewhere wrote them down
        self._rows: Any = None

    def put(self, ids: NDArray[np.int64], personal: Any) -> None:
        """Write rows; leaves of ``personal`` are [len(ids), ...]."""
        if self._rows is None:
            self._home = self._choose(personal, len(ids))
            self._rows = {path: self._space(path, leaf) for path, leaf in tree.items(personal)}
            self._shape = tree.map(lambda _: None, personal)
        index = torch.from_numpy(ids).to(self._home)
        for path, leaf in tree.items(personal):
            self._rows[path].index_copy_(0, index, leaf.detach().to(self._home))
        self.born[ids] = self.changed[ids] = True

    def get(self, ids: NDArray[np.int64]) -> Any:
        """Rows of clients that were written before, on the store's device, leaves [len(ids), ...] (copies)."""
        return moved(self._copies(ids), self.device) if self._home != self.device else self._copies(ids)

    def like(self) -> Store:
        """Return an empty store for as many clients on the same device."""
        return Store(self.clients, device=self.device)

    @property
    def bytes(self) -> int:
        """The size of the state of all clients that were written."""
        rows = [] if self._rows is None else self._rows.values()
        return sum(leaf[0].numel() * leaf.element_size() for leaf in rows if len(leaf)) * int(self.born.sum())

    def dump(self, ids: NDArray[np.int64] | None = None) -> Any:
        """Return the state of all clients that were written, or of these, as one tree on the CPU."""
        ids = np.flatnonzero(self.born) if ids is None else ids
        return {"ids": torch.from_numpy(ids), "rows": moved(self._copies(ids), CPU) if self._rows is not None else {}}

    def fill(self, dumped: Any) -> None:
        """Take back what ``dump`` gave."""
        if len(dumped["ids"]):
            self.put(dumped["ids"].numpy(), dumped["rows"])

    def _copies(self, ids: NDArray[np.int64]) -> Any:
        index = torch.from_numpy(ids).to(self._home)
        return tree.refill(self._shape, iter(rows.index_select(0, index) for rows in self._rows.values()))

    def _choose(self, personal: Any, count: int) -> torch.device:
        """Return where the rows of all clients are kept, seen those of ``count`` of them."""
        if self.device.type == "cpu" or self.folder is not None:
            return CPU
        whole = size(*tree.leaves(personal)) // max(1, count) * self.clients
        return self.device if whole <= SHARE * backend(self.device).free(self.device) else CPU

    def _space(self, path: str, leaf: Tensor) -> Tensor:
        shape = (self.clients, *leaf.shape[1:])
        if self.folder is None:
            return torch.empty(shape, dtype=leaf.dtype, device=self._home)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / (path.replace("/", "__").replace(":", "_") + ".bin")
        numbers = int(np.prod(shape))
        return (
            torch.from_file(str(file), shared=True, size=numbers, dtype=leaf.dtype).view(shape) if numbers else torch.empty(shape)
        )
