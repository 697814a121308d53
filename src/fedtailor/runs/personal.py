"""Everybody's personal trees as few tensors: clients whose trees have the same shapes are stacked, beside who is in which row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor import tree
from fedtailor.errors import BadRun

STACKS = "stacks"
Chunk = tuple[NDArray[np.int64], Any]  # clients by number, and their trees: leaves [clients, ...]


def stacked(chunks: Iterable[Chunk], most: int) -> dict[str, Any]:
    """Return the trees of all chunks as one tree to be written; none of them if they have more than ``most`` bytes."""
    alike: dict[str, list[Chunk]] = {}
    size = 0
    for clients, branch in chunks:
        size += sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(branch))
        if size > most:
            return {STACKS: {}}
        shapes = tree.map(lambda leaf: (tuple(leaf.shape[1:]), leaf.dtype), branch)
        alike.setdefault(repr(shapes), []).append((clients, branch))
    return {STACKS: {str(i): _joined(parts) for i, parts in enumerate(alike.values())}}


def _joined(parts: Sequence[Chunk]) -> dict[str, Any]:
    """Return chunks of the same shapes as one, by the number of the client."""
    clients = torch.from_numpy(np.concatenate([clients for clients, _ in parts]))
    order = torch.argsort(clients)
    return {
        "clients": clients[order],
        "trees": tree.map(lambda *leaves: torch.cat(leaves)[order], *(branch for _, branch in parts)),
    }


@dataclass(frozen=True, eq=False)
class PersonalTrees(Mapping[str, Any]):
    """Every client's tree by name, taken out of ``packed``, the tree that was written, when asked for."""

    names: Sequence[str]
    packed: Mapping[str, Any]

    @cached_property
    def _places(self) -> dict[str, tuple[str, int]]:
        """The stack of each client, and its row there."""
        if STACKS not in self.packed:  # an earlier version wrote a tree for each
            return {name: (str(i), 0) for i, name in enumerate(self.names) if str(i) in self.packed}
        places: dict[str, tuple[str, int]] = {}
        for key, stack in self.packed[STACKS].items():
            if any(len(leaf) != len(stack["clients"]) for leaf in tree.leaves(stack["trees"])):
                raise BadRun("a stack of personal models has not one for each client; restore the file, or train anew")
            places |= {self.names[client]: (key, row) for row, client in enumerate(stack["clients"].tolist())}
        return places

    def __getitem__(self, name: str) -> Any:
        key, row = self._places[name]
        if STACKS not in self.packed:
            return self.packed[key]
        return tree.map(lambda leaf: leaf[row], self.packed[STACKS][key]["trees"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
