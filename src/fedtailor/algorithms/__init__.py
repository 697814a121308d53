"""The methods, one file each. ``registry`` maps their names to the classes."""

from __future__ import annotations

from fedtailor.algorithms.al2sgd import AL2SGD
from fedtailor.algorithms.apfl import APFL
from fedtailor.algorithms.base import Algorithm, Limit, Round, amount, param
from fedtailor.algorithms.ditto import Ditto
from fedtailor.algorithms.fedadam import FedAdam
from fedtailor.algorithms.fedalt import FedAlt
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.algorithms.fedavgft import FedAvgFT
from fedtailor.algorithms.fedavgm import FedAvgM
from fedtailor.algorithms.fedavgp import FedAvgP
from fedtailor.algorithms.fedbabu import FedBABU
from fedtailor.algorithms.fedbn import FedBN
from fedtailor.algorithms.fedclup import FedCLUP
from fedtailor.algorithms.fedclup_dynamic import FedCLUPDynamic
from fedtailor.algorithms.feddf import FedDF
from fedtailor.algorithms.feddyn import FedDyn
from fedtailor.algorithms.fedper import FedPer
from fedtailor.algorithms.fedprox import FedProx
from fedtailor.algorithms.fedprox_personal import FedProxPersonal
from fedtailor.algorithms.fedrep import FedRep
from fedtailor.algorithms.fedsim import FedSim
from fedtailor.algorithms.fedyogi import FedYogi
from fedtailor.algorithms.flow import Flow
from fedtailor.algorithms.hypcluster import HypCluster
from fedtailor.algorithms.knnper import KNNPer
from fedtailor.algorithms.l2gd import L2GD
from fedtailor.algorithms.lgfedavg import LGFedAvg
from fedtailor.algorithms.local import Local
from fedtailor.algorithms.mtl import MTL
from fedtailor.algorithms.partialfed import PartialFed
from fedtailor.algorithms.perada import PerAda
from fedtailor.algorithms.perfedavg import PerFedAvg
from fedtailor.algorithms.pfedme import PFedMe
from fedtailor.algorithms.scaffold import Scaffold
from fedtailor.algorithms.scaffoldp import ScaffoldP

METHODS: tuple[type[Algorithm], ...] = (
    Local,
    FedAvg,
    FedAvgFT,
    FedProx,
    FedProxPersonal,
    FedCLUP,
    PFedMe,
    Ditto,
    FedAvgP,
    ScaffoldP,
    FedSim,
    FedAlt,
    FedPer,
    FedRep,
    LGFedAvg,
    FedBABU,
    FedBN,
    Scaffold,
    FedDyn,
    FedDF,
    FedAvgM,
    FedAdam,
    FedYogi,
    MTL,
    APFL,
    PerFedAvg,
    KNNPer,
    HypCluster,
    PartialFed,
    Flow,
    PerAda,
    L2GD,
    AL2SGD,
    FedCLUPDynamic,
)
registry: dict[str, type[Algorithm]] = {method.__name__: method for method in METHODS}

__all__ = [*registry, "METHODS", "Algorithm", "Limit", "Round", "amount", "param", "registry"]
