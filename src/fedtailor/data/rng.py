"""Randomness as a function: every draw derives from (seed, purpose, round, client, ...), never from a hidden state.

SplitMix64's finaliser on unsigned 64-bit words, vectorised; the same numbers on every engine, in any order, after a
resume.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(*parts: ArrayLike) -> Words:
    """Return a 64-bit word from integers or arrays of integers (broadcast against each other)."""
    word: Words = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            word = _finalise((word ^ np.asarray(part).astype(np.uint64)) + _GOLDEN)
    return word


def _finalise(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def purpose(name: str) -> int:
    """Return a 64-bit word for a string (a client's name, the purpose of a draw), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def generator(seed: int, name: str, *parts: int) -> np.random.Generator:
    """Return a NumPy generator for draws that happen once (a cohort, a split)."""
    return np.random.default_rng([seed, purpose(name), *parts])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Start torch's, NumPy's and Python's generators from ``seed`` for code of the user's own; outside they go on as if nothing
    had been drawn."""
    others = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(others[0])
            random.setstate(others[1])
