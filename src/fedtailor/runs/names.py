"""Names: very many clients' names as a few tensors, in which one is found without looking at the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.data import rng
from fedtailor.errors import BadRun


def packed_text(names: Sequence[str]) -> dict[str, Tensor]:
    """Return names as two tensors: their text, and where each ends in it."""
    coded = [name.encode("utf-8", "surrogatepass") for name in names]
    return {
        "text": torch.from_numpy(np.frombuffer(b"".join(coded), np.uint8).copy()),
        "ends": torch.from_numpy(np.cumsum(np.fromiter(map(len, coded), np.int64, len(coded)))),
    }


def unpacked_text(packed: Mapping[str, Tensor]) -> list[str]:
    """Return the names that ``packed_text`` packed."""
    text, ends = packed["text"].numpy().tobytes(), packed["ends"].tolist()
    return (
        [text[start:end].decode("utf-8", "surrogatepass") for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        if ends
        else []
    )


def packed_names(names: Sequence[str]) -> dict[str, Tensor]:
    """Return names as tensors in which each is found: their text, their words (``rng.purpose``) in order, and whose each is."""
    words = np.fromiter(map(rng.purpose, names), np.uint64, len(names))
    order = np.argsort(words, kind="stable")
    return {**packed_text(names), "words": torch.from_numpy(words[order].view(np.int64)), "order": torch.from_numpy(order)}


class Names(Sequence[str]):
    """The names that were packed, in their order."""

    def __init__(self, packed: Mapping[str, Tensor]) -> None:
        self._packed, self._text = packed, packed["text"].numpy().tobytes()
        self._ends, self._order = packed["ends"].numpy(), packed["order"].numpy()
        self._words = packed["words"].numpy().view(np.uint64)
        if not len(self._ends) == len(self._order) == len(self._words):
            raise BadRun("the index of clients was changed; restore it from a copy, or train anew")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"no client {place}; there are {len(self)}")
        place %= len(self)
        start = int(self._ends[place - 1]) if place else 0
        return self._text[start : int(self._ends[place])].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return iter(unpacked_text(self._packed))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def find(self, name: str) -> int | None:
        """Return a client's number; None where there is no such client."""
        word = np.uint64(rng.purpose(name))
        place = int(np.searchsorted(self._words, word))
        while place < len(self) and self._words[place] == word:  # two names may have one word
            client = int(self._order[place])
            if self[client] == name:
                return client
            place += 1
        return None
