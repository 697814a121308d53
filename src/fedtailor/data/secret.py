"""Randomness that nobody outside a client can repeat: which rows a private step uses, and the noise on what it releases.

A secret is 32 bytes from the operating system, drawn for every run. What is drawn from it is bound to what it is for (method,
settings, phase, round, client, step, use), so no two releases ever share noise, whatever seeds they share.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

SIZE = 32  # bytes


@dataclass(frozen=True, eq=False, repr=False)
class Secret:
    """The key of a run's private randomness. ``known`` says that it follows from a number that was given: it hides nothing."""

    _key: bytes
    known: bool = False

    @classmethod
    def fresh(cls) -> Secret:
        """Return a secret that nobody has seen."""
        return cls(os.urandom(SIZE))

    @classmethod
    def from_seed(cls, seed: int) -> Secret:
        """Return the key that a number stands for: to repeat a run exactly, at the price of its privacy."""
        return cls(hashlib.blake2b(b"fedtailor:%d" % seed, digest_size=SIZE).digest(), known=True)

    @classmethod
    def from_hex(cls, text: str) -> Secret:
        key = bytes.fromhex(text.strip())
        if len(key) != SIZE:
            raise ValueError(f"a secret has {SIZE} bytes, not {len(key)}")
        return cls(key)

    def hex(self) -> str:
        """Return the secret in letters, to be kept where only its owner reads."""
        return self._key.hex()

    def bound(self, *purpose: Any) -> Secret:
        """Return a secret for one purpose; those for different purposes have nothing in common."""
        return Secret(self._digest(repr(purpose).encode(), SIZE), self.known)

    def word(self, *purpose: Any) -> np.uint64:
        """Return 64 bits for one purpose."""
        return np.uint64(int.from_bytes(self._digest(repr(purpose).encode(), 8), "little"))

    def generator(self, *numbers: int) -> np.random.Generator:
        """Return a generator of its own for these numbers: Philox with a key of 128 bits."""
        data = b"".join(int(number).to_bytes(8, "little", signed=number < 0) for number in numbers)
        key = np.frombuffer(self._digest(data, 16), np.uint64)
        return np.random.Generator(np.random.Philox(key=key))

    def _digest(self, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=size).digest()

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not copied to another process or file; make one there")


class Use(NamedTuple):
    """One use of a batch by a private step: its number in the visit, and where its noise comes from (None: drawn on the spot)."""

    number: int = 0
    secret: Secret | None = None


NO_USE = Use()
