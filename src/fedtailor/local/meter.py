"""The meter: how many parameters a client's work moves, counted where it is done.

A descent that starts from the very tensors in which another ended goes on with the same parameters, and they are counted once;
from any other start it trains parameters of its own. Scans are counted alike, by what they carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedtailor import tree


@dataclass(eq=False)
class Tally:
    """Parameters moved by one kind of work. ``ends`` holds on to where it ended, so that an id stands for one tensor."""

    count: int = 0
    ends: dict[int, Tensor] = field(default_factory=dict)

    def add(self, before: Any, after: Any, rates: Mapping[str, float]) -> None:
        ends = dict(tree.items(after))
        for path, leaf in _parameters(before):
            if rates.get(path, 1.0):
                self.count += 0 if id(leaf) in self.ends else leaf.numel()
                self.ends[id(ends[path])] = ends[path]


@dataclass(eq=False)
class Meter:
    """The work of one visit to a client. ``detours`` says that a descent was on ``task.risk`` and something more."""

    descents: Tally = field(default_factory=Tally)
    scans: Tally = field(default_factory=Tally)
    differentiated: int = 0  # parameters of the largest gradient asked for by itself
    detours: bool = False

    @property
    def trained(self) -> int:
        """The number of parameters trained: those of all descents (two models count twice); in a method that steps by itself,
        those that its scans carry, or else those it takes gradients of."""
        return self.descents.count or self.scans.count or self.differentiated

    def differentiates(self, params: Any) -> None:
        self.differentiated = max(self.differentiated, sum(leaf.numel() for _, leaf in _parameters(params)))


def _parameters(params: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model: neither buffers nor single numbers (a mixing weight, a count)."""
    return ((path, leaf) for path, leaf in tree.items(params) if not tree.is_buffer(path) and leaf.dim())


_meter: ContextVar[Meter | None] = ContextVar("meter", default=None)
running = _meter.get


@contextmanager
def metered(meter: Meter | None) -> Iterator[None]:
    """Count in ``meter`` what is descended on and scanned inside (None: count nothing)."""
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)
