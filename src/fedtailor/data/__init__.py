"""From raw arrays to clients' batches."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedtailor.data.batches import Batches, Work
from fedtailor.data.federation import Federation

if TYPE_CHECKING:
    from fedtailor.data import shift

__all__ = ["Batches", "Federation", "Work", "shift"]


def __getattr__(name: str) -> Any:
    if name == "shift":  # loaded when first used
        return import_module("fedtailor.data.shift")
    raise AttributeError(f"module 'fedtailor.data' has no attribute {name!r}")
