"""A map over many items that uses all cores where there is enough work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def parallel_map(function: Callable[[T], U], items: Sequence[T], rows: int) -> list[U]:
    """Return ``function`` of every item; with many rows in threads, because NumPy releases the interpreter in its loops."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if rows < 100_000 or cores == 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(cores) as pool:
        return list(pool.map(function, items))
