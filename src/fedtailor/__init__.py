"""fedtailor: personalised federated learning, each method tested against its equations.

The names below are loaded when first used, so that ``import fedtailor`` is quick and starts nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedtailor.version import __version__ as __version__

if TYPE_CHECKING:
    from fedtailor import data, errors, models, tree
    from fedtailor.advisor.advise import Advice, advise
    from fedtailor.advisor.sweep import Sweep, sweep
    from fedtailor.algorithms import (
        AL2SGD,
        APFL,
        L2GD,
        MTL,
        Algorithm,
        Ditto,
        FedAdam,
        FedAlt,
        FedAvg,
        FedAvgFT,
        FedAvgM,
        FedAvgP,
        FedBABU,
        FedBN,
        FedCLUP,
        FedCLUPDynamic,
        FedDF,
        FedDyn,
        FedPer,
        FedProx,
        FedProxPersonal,
        FedRep,
        FedSim,
        FedYogi,
        Flow,
        HypCluster,
        KNNPer,
        LGFedAvg,
        Limit,
        Local,
        PartialFed,
        PerAda,
        PerFedAvg,
        PFedMe,
        Round,
        Scaffold,
        ScaffoldP,
        param,
    )
    from fedtailor.data import Federation, Work
    from fedtailor.engine.compare import Comparison, compare
    from fedtailor.engine.run import run
    from fedtailor.laws import check_algorithm
    from fedtailor.local import SGD, Adam, Private, descend, prox, scan
    from fedtailor.local.schedule import Cosine, Exponential, Harmonic, Milestones
    from fedtailor.runs.history import Run
    from fedtailor.task import Task

_HOMES = {
    "fedtailor": ("data", "errors", "models", "tree"),
    "fedtailor.advisor.advise": ("Advice", "advise"),
    "fedtailor.advisor.sweep": ("Sweep", "sweep"),
    "fedtailor.data": ("Federation", "Work"),
    "fedtailor.engine.compare": ("Comparison", "compare"),
    "fedtailor.engine.run": ("run",),
    "fedtailor.laws": ("check_algorithm",),
    "fedtailor.local": ("SGD", "Adam", "Private", "descend", "prox", "scan"),
    "fedtailor.local.schedule": ("Cosine", "Exponential", "Harmonic", "Milestones"),
    "fedtailor.runs.history": ("Run",),
    "fedtailor.task": ("Task",),
}
__all__ = [
    "AL2SGD",
    "APFL",
    "L2GD",
    "MTL",
    "SGD",
    "Adam",
    "Advice",
    "Algorithm",
    "Comparison",
    "Cosine",
    "Ditto",
    "Exponential",
    "FedAdam",
    "FedAlt",
    "FedAvg",
    "FedAvgFT",
    "FedAvgM",
    "FedAvgP",
    "FedBABU",
    "FedBN",
    "FedCLUP",
    "FedCLUPDynamic",
    "FedDF",
    "FedDyn",
    "FedPer",
    "FedProx",
    "FedProxPersonal",
    "FedRep",
    "FedSim",
    "FedYogi",
    "Federation",
    "Flow",
    "Harmonic",
    "HypCluster",
    "KNNPer",
    "LGFedAvg",
    "Limit",
    "Local",
    "Milestones",
    "PFedMe",
    "PartialFed",
    "PerAda",
    "PerFedAvg",
    "Private",
    "Round",
    "Run",
    "Scaffold",
    "ScaffoldP",
    "Sweep",
    "Task",
    "Work",
    "advise",
    "check_algorithm",
    "compare",
    "data",
    "descend",
    "errors",
    "models",
    "param",
    "prox",
    "run",
    "scan",
    "sweep",
    "tree",
]

# what has no other home is a method, or of the methods' interface
_HOME = {**dict.fromkeys(__all__, "fedtailor.algorithms"), **{name: home for home, names in _HOMES.items() for name in names}}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fedtailor' has no attribute {name!r}")
    return import_module(f"fedtailor.{name}") if home == "fedtailor" else getattr(import_module(home), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
