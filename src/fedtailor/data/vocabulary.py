"""Vocabulary: the characters or words of a text, as numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.words import check_choice, shown
from fedtailor.errors import InvalidArgument

LEVELS = ("char", "word")
UNKNOWN = "<unk>"
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*|[^\w\s]|_")  # words with their apostrophes, and signs one by one


@dataclass(frozen=True)
class Vocabulary:
    """The words that numbers stand for; ``unknown`` is the number of everything else (None: there is nothing else)."""

    level: str
    tokens: tuple[str, ...]
    unknown: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def number(self) -> Mapping[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @staticmethod
    def of(level: str, pieces: Iterable[Sequence[str]], most: int | None) -> Vocabulary:
        """Collect the unknown token, then the ``most`` frequent ones of these pieces (None: every character, or the words
        that occur twice), by falling frequency."""
        count = Counter(token for piece in pieces for token in piece)
        least = 2 if level == "word" and most is None else 1
        ranked = sorted((t for t, n in count.items() if n >= least), key=lambda t: (-count[t], t))[:most]
        return Vocabulary(level, (UNKNOWN, *ranked), 0)

    def encode(self, text: str) -> NDArray[np.int64]:
        tokens = cut(text, self.level)
        if self.unknown is None:
            unknown_token = next((t for t in tokens if t not in self.number), None)
            if unknown_token is not None:
                raise InvalidArgument(f"{shown(unknown_token)} is not in the vocabulary of {len(self)}; leave it out of the text")
            return np.fromiter((self.number[t] for t in tokens), np.int64, len(tokens))
        return np.fromiter((self.number.get(t, self.unknown) for t in tokens), np.int64, len(tokens))

    def to_json(self) -> dict[str, Any]:
        return {"level": self.level, "tokens": list(self.tokens), "unknown": self.unknown}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Vocabulary:
        return Vocabulary(data["level"], tuple(data["tokens"]), data["unknown"])


def cut(text: str, level: str) -> Sequence[str]:
    """Split a text into characters, or into lower-case words and punctuation marks."""
    check_choice("level", level, LEVELS)
    return text if level == "char" else WORD.findall(text.lower())
