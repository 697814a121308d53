"""The methods, one file each: every module of this package is imported, and a class that it defines is known.

``METHODS`` are ours, by family and name; ``registry`` maps their names to the classes. They are attributes of this module too.
"""

from __future__ import annotations

from importlib import import_module
from inspect import isabstract
from pkgutil import iter_modules
from typing import Any

from fedtailor.algorithms import origin
from fedtailor.algorithms.base import FAMILIES, Algorithm, Limit, Round, amount, param


def _rank(method: type[Algorithm]) -> tuple[int, str, str]:
    place = FAMILIES.index(method.family) if method.family in FAMILIES else len(FAMILIES)
    return place, method.family, method.__name__.lower()


for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
METHODS: tuple[type[Algorithm], ...] = tuple(
    sorted((kind for kind in origin.defined() if origin.of(kind) is None and not isabstract(kind)), key=_rank)
)
registry: dict[str, type[Algorithm]] = {method.__name__: method for method in METHODS}
globals().update(registry)

__all__ = [*registry, "METHODS", "Algorithm", "Limit", "Round", "amount", "param", "registry"]


def __getattr__(name: str) -> Any:
    """For type checkers, which cannot know the methods."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
