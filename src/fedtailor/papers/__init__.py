"""The papers' experiments: a folder per paper, a file per experiment, found by being there.

A file has an ``EXPERIMENT``: settings at two scales, a function that measures one seed, the paper's figure, and claims on the
numbers. ``ledger`` says which claims held.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from fedtailor.errors import InvalidArgument, nearest
from fedtailor.papers.base import Experiment

__all__ = ["PAPERS", "Experiment", "chosen", "experiments"]

PAPERS = ("clup", "minimax", "perada", "partial", "flow")


def experiments() -> dict[str, Experiment]:
    """Return every experiment by name, as clup/heterogeneity."""
    out = {}
    for paper in PAPERS:
        package = import_module(f"{__name__}.{paper}")
        for module in iter_modules(package.__path__):
            name = f"{paper}/{module.name.replace('_', '-')}"
            out[name] = import_module(f"{package.__name__}.{module.name}").EXPERIMENT
    return out


def chosen(name: str | None) -> dict[str, Experiment]:
    """Return the experiments of a paper, the one called PAPER/EXPERIMENT, or all without a name."""
    every = experiments()
    if name is None:
        return every
    found = {key: experiment for key, experiment in every.items() if name.lower() in (key, key.partition("/")[0])}
    if not found:
        raise InvalidArgument(f"no paper or experiment {name!r}; {nearest(name, [*PAPERS, *every], 'there are')}")
    return found
