"""Strong convexity and smoothness of a federation's risks, for linear models.

The Hessian of a client's risk is X'DX/n with D between 0 and ``curvature``; least squares has D = 1 exactly. Weight decay
adds to both constants. mu is the smallest over the clients, L the largest: what a theorem needs to hold for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument
from fedtailor.task import Task

# Largest eigenvalue of the Hessian of the loss in the logits: softmax 1/2 (Boehning 1992), one sigmoid 1/4.
CURVATURE = {"regression": 1.0, "classification": 0.5, "multilabel": 0.25}


@dataclass(frozen=True)
class Constants:
    mu: float
    smoothness: float

    @property
    def kappa(self) -> float:
        return self.smoothness / self.mu


def constants(task: Task, federation: Federation, weight_decay: float = 0.0) -> Constants:
    """mu and L of the clients' training risks. Refuses a model that is not linear or not strongly convex."""
    if task.gradient is None:
        raise InvalidArgument("the constants mu and L are known for the model 'linear' only; give lr, server_lr and steps")
    outputs = 1 if task.kind == "classification" else federation.outputs
    smallest, largest = float("inf"), 0.0
    for i in range(len(federation)):
        x = federation.train.client(i)[0].flatten(1).double()
        if "bias" in task.init():
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        eigenvalues = torch.linalg.eigvalsh(x.T @ x / len(x)) / outputs
        smallest, largest = min(smallest, float(eigenvalues[0])), max(largest, float(eigenvalues[-1]))
    mu = max(smallest, 0.0) if task.kind == "regression" else 0.0  # a logistic risk flattens out: only decay bends it
    found = Constants(mu + weight_decay, CURVATURE[task.kind] * largest + weight_decay)
    if found.mu <= 1e-10 * found.smoothness:
        raise InvalidArgument(
            "a client's risk is not strongly convex (mu = 0), which the theory's step sizes need; "
            "add weight decay, for instance opt=ft.SGD(weight_decay=0.01), or give lr, server_lr and steps"
        )
    return found
