"""The methods, one file each. ``registry`` maps their names to the classes."""

from __future__ import annotations

from fedtailor.algorithms.base import Algorithm, Limit, Round, amount, param
from fedtailor.algorithms.ditto import Ditto
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fedavgft import FedAvgFT
from fedtailor.algorithms.fedclup import FedCLUP
from fedtailor.algorithms.fedprox import FedProx
from fedtailor.algorithms.fedprox_personal import FedProxPersonal
from fedtailor.algorithms.local import Local
from fedtailor.algorithms.pfedme import PFedMe

METHODS: tuple[type[Algorithm], ...] = (Local, FedAvg, FedAvgFT, FedProx, FedProxPersonal, FedCLUP, PFedMe, Ditto)
registry: dict[str, type[Algorithm]] = {method.__name__: method for method in METHODS}

__all__ = [*registry, "METHODS", "Algorithm", "Limit", "Round", "amount", "param", "registry"]
