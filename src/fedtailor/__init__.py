"""fedtailor: personalised federated learning, each method tested against its equations.

The names below are loaded when first used, so that ``import fedtailor`` is quick and starts nothing.
"""

# ruff: noqa: F401 (type checkers read the imports, __getattr__ makes them)
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedtailor.version import __version__ as __version__

if TYPE_CHECKING:  # the methods, which are found by looking, are Any to a type checker
    from fedtailor import data, errors, models, tree
    from fedtailor.advisor.advise import Advice, advise
    from fedtailor.advisor.sweep import Sweep, sweep
    from fedtailor.algorithms.base import Algorithm, Limit, Round, param
    from fedtailor.data import Federation, Work
    from fedtailor.engine.compare import Comparison, compare
    from fedtailor.engine.onboard import onboard
    from fedtailor.engine.run import run
    from fedtailor.estimators import FederatedClassifier, FederatedRegressor
    from fedtailor.laws import check_algorithm, check_model
    from fedtailor.local import SGD, Adam, Optimizer, Private, TorchOptimizer, descend, prox, scan
    from fedtailor.local.schedule import Cosine, Exponential, Harmonic, Lambda, Milestones, Schedule
    from fedtailor.models.mixed import Mixed
    from fedtailor.runs.history import Run
    from fedtailor.runs.sharded import save_shards
    from fedtailor.task import Task

_HOMES = {
    "fedtailor": ("data", "errors", "models", "tree"),
    "fedtailor.advisor.advise": ("Advice", "advise"),
    "fedtailor.advisor.sweep": ("Sweep", "sweep"),
    "fedtailor.algorithms.base": ("Algorithm", "Limit", "Round", "param"),
    "fedtailor.data": ("Federation", "Work"),
    "fedtailor.engine.compare": ("Comparison", "compare"),
    "fedtailor.engine.onboard": ("onboard",),
    "fedtailor.engine.run": ("run",),
    "fedtailor.estimators": ("FederatedClassifier", "FederatedRegressor"),
    "fedtailor.laws": ("check_algorithm", "check_model"),
    "fedtailor.local": ("SGD", "Adam", "Optimizer", "Private", "TorchOptimizer", "descend", "prox", "scan"),
    "fedtailor.local.schedule": ("Cosine", "Exponential", "Harmonic", "Lambda", "Milestones", "Schedule"),
    "fedtailor.models.mixed": ("Mixed",),
    "fedtailor.runs.history": ("Run",),
    "fedtailor.runs.sharded": ("save_shards",),
    "fedtailor.task": ("Task",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Return the names above, the methods (classes, so they begin with a capital), and ``__all__``, which has to know them."""
    if name in _HOME:
        home = _HOME[name]
        return import_module(f"fedtailor.{name}") if home == "fedtailor" else getattr(import_module(home), name)
    if name == "__all__":
        return sorted([*_HOME, *import_module("fedtailor.algorithms").registry])
    if name[0].isupper():
        methods = import_module("fedtailor.algorithms").registry
        if name in methods:
            return methods[name]
    raise AttributeError(f"module 'fedtailor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__getattr__("__all__"), "__version__"]
