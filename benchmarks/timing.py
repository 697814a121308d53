"""Time several ways of doing the same thing, turn about, so that a slow minute slows them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def turn_about(ways: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1) -> dict[str, float]:
    """Median seconds of each way over ``rounds`` goes, after ``warm_up`` goes that do not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for go in range(warm_up + rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if go >= warm_up:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def on_threads(count: int, way: Callable[[], object]) -> Callable[[], object]:
    """``way`` on a number of torch threads."""

    def run() -> object:
        torch.set_num_threads(count)
        return way()

    return run
