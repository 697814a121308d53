"""The same work on many items, on all cores where it is worth it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def each(do: Callable[[T], U], items: Sequence[T], rows: int) -> list[U]:
    """``do`` on every item; many rows are worth threads, because NumPy lets go of the interpreter in its loops."""
    if rows < 100_000:
        return [do(item) for item in items]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(do, items))
