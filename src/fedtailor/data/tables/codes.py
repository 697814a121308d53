"""Codes into texts: counting, choosing and ordering them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.columns import Ints
from fedtailor.data.formats import as_numbers


def tally(codes: NDArray[Any], count: int) -> Ints:
    """Return how often each code below ``count`` occurs; -1 does not count."""
    return np.bincount(codes[codes >= 0] if codes.min(initial=0) < 0 else codes, minlength=count)


def take_rows(values: NDArray[Any], rows: Ints) -> NDArray[Any]:
    """Return ``values[rows]`` for increasing rows, without a copy where these are all rows."""
    return values if len(rows) == len(values) else values[rows]


def in_order(texts: Sequence[str]) -> list[int]:
    """Return the positions in sorted order: by number if all texts are numbers, else by text."""
    numbers = as_numbers(texts)
    if np.isnan(numbers).any():
        return sorted(range(len(texts)), key=lambda i: texts[i])
    # long whole numbers that are one float64 still differ as integers
    whole = [int(t) if re.fullmatch(r"-?\d{1,4000}", t) else 0 for t in texts]
    return sorted(range(len(texts)), key=lambda i: (numbers[i], whole[i], texts[i]))
