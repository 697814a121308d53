"""What happens on a client: the training loops, optimisers, schedules and penalties."""

from fedtailor.local.curvature import conjugate_gradient, hvp, hvp_on
from fedtailor.local.loop import Turn, alternate, count_steps, descend, gradient, gradient_on, repeat, scan
from fedtailor.local.optim import SGD, Adam, Optimizer
from fedtailor.local.penalty import Penalty, linear, prox
from fedtailor.local.private import Private
from fedtailor.local.schedule import Schedule
from fedtailor.local.torch_optim import TorchOptimizer

__all__ = [
    "SGD",
    "Adam",
    "Optimizer",
    "Penalty",
    "Private",
    "Schedule",
    "TorchOptimizer",
    "Turn",
    "alternate",
    "conjugate_gradient",
    "count_steps",
    "descend",
    "gradient",
    "gradient_on",
    "hvp",
    "hvp_on",
    "linear",
    "prox",
    "repeat",
    "scan",
]
