"""Augmentation: a function of the user's own that changes the rows of a batch, with random numbers of ours.

It is called as ``augment(x, draw)``: rows [rows, ...] (or the dict or tuple of their parts), and a ``Draw`` whose numbers are a
function of (seed, round, client, phase, step, row). Rows come out the same on every engine, with any number of workers, in any
batch; so a function may not mix them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data import rng
from fedtailor.errors import FedtailorError, InvalidArgument
from fedtailor.task.packing import Packing

PURPOSE = rng.purpose("augment")
TRIED = 4  # rows


class Draw:
    """Random numbers of each row: every call gives new ones, [rows, *shape]."""

    def __init__(self, keys: NDArray[np.uint64], like: Tensor) -> None:
        self._keys, self._like, self._calls = keys, like, 0

    def _units(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Numbers in [0, 1) with 24 bits, which single precision holds."""
        count = int(np.prod(shape, dtype=np.int64))
        words = rng.mix(rng.mix(self._keys, self._calls)[:, None], np.arange(count))
        self._calls += 1
        return ((words >> np.uint64(40)).astype(np.float64) / 2**24).reshape(len(self._keys), *shape)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers in [0, 1)."""
        return torch.from_numpy(self._units(shape)).to(self._like)

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers."""
        radius = np.sqrt(-2 * np.log1p(-self._units(shape)))
        return torch.from_numpy(radius * np.cos(2 * np.pi * self._units(shape))).to(self._like)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return whole numbers from ``low`` up to and without ``high``."""
        return torch.from_numpy(np.floor(self._units(shape) * (high - low)).astype(np.int64) + low).to(self._like.device)

    def chance(self, share: float, like: Tensor | None = None) -> Tensor:
        """Return for every row whether it is among a ``share`` of them; shaped to be used in ``torch.where`` on ``like``."""
        chosen = torch.from_numpy(self._units(()) < share).to(self._like.device)
        return chosen if like is None else chosen.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True, eq=False)
class Augment:
    """``function`` as a function of packed rows and of the words (one for each row) that their numbers come from."""

    function: Callable[[Any, Draw], Any]
    name: str
    packing: Packing | None = None

    def __call__(self, x: Tensor, step: NDArray[np.int64], row: NDArray[np.int64]) -> Tensor:
        """Return the rows ``x``, changed; ``step`` is the word of each row's step, ``row`` the row's number within its client."""
        draw = Draw(rng.mix(step, PURPOSE, row), x)
        with torch.no_grad():
            new = self.function(x if self.packing is None else self.packing.unpack(x), draw)
            new = new if self.packing is None else self.packing.pack(new, f"what {self.name} returns").to(x)
        if not isinstance(new, Tensor) or new.shape != x.shape or new.dtype != x.dtype:
            have = f"{tuple(new.shape)} of {new.dtype}" if isinstance(new, Tensor) else type(new).__name__
            raise InvalidArgument(
                f"the augmentation {self.name} makes {have} of rows {tuple(x.shape)} of {x.dtype}; let it return rows like those"
            )
        return new

    def check(self, x: Tensor, length: int = TRIED) -> None:
        """Refuse a function that fails, mixes rows, changes them in place, or draws numbers of its own (in batches of ``length``
        rows, or of a few)."""
        rows, number = x[:TRIED].clone(), np.arange(min(TRIED, len(x)))
        step = np.full(len(rows), 7)
        before = _generators()
        try:
            if length > TRIED:
                batch = x[:length].clone()
                self(batch, np.full(len(batch), 7), np.arange(len(batch)))
            whole = self(rows, step, number)
            one_by_one = torch.cat([self(rows[i : i + 1], step[i : i + 1], number[i : i + 1]) for i in number])
        except FedtailorError:
            raise
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InvalidArgument(
                f"the augmentation {self.name} fails ({type(error).__name__}: {text}); it is called with (x, draw)"
            ) from error
        if _generators() != before:
            raise InvalidArgument(
                f"the augmentation {self.name} draws from a global generator; use draw.uniform(), draw.normal(), ..."
            )
        if not torch.equal(rows, x[:TRIED]):
            raise InvalidArgument(f"the augmentation {self.name} changes rows in place; let it return new ones")
        if not torch.allclose(whole, one_by_one, rtol=1e-4, atol=1e-5):
            raise InvalidArgument(
                f"the augmentation {self.name} mixes rows, or remembers something; let each row depend on itself"
            )


def _generators() -> tuple[bytes, bytes, int]:
    state: Any = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), state[1].tobytes() + bytes([state[2] % 256]), hash(random.getstate())
