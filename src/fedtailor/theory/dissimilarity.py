"""How far apart the clients' gradients are: b^2 (PARTIAL), (G, B) and each client's diversity (FLOW, Assumption E.4 and E.5).

The papers take the largest over all models. Here it is the largest over the models passed in, so every number is a lower
bound on the paper's constant; along the iterates of a run it is what that run met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument
from fedtailor.local import gradient_on
from fedtailor.task import Task
from fedtailor.theory.partial import dissimilarity

__all__ = ["Bounded", "bounded", "client_gradients", "dissimilarity", "diversity"]


class Bounded(NamedTuple):
    """The bound mean_i |grad f_i|^2 <= G2 + B^2 |grad f|^2 at every point looked at."""

    G2: float
    B: float


def client_gradients(task: Task, federation: Federation, model: Mapping[str, Tensor], weight_decay: float = 0.0) -> Tensor:
    """[clients, parameters]: the gradients of the training risks at one model, in float64."""
    point = {name: value.clone() for name, value in model.items()}
    gradients = []
    for i in range(len(federation)):
        x, y = federation.train.client(i)
        slopes = tree.trainable(gradient_on(task.risk, point, {"x": x, "y": y}))
        full = [slopes[name].double() + weight_decay * point[name].double() for name in slopes]
        gradients.append(torch.cat([leaf.reshape(-1) for leaf in full]))
    return torch.stack(gradients)


def bounded(points: Sequence[Tensor], B: float = 1.0) -> Bounded:
    """Return the least G^2 that goes with ``B`` >= 1 (FLOW's form for risks that need not be convex); ``points`` are what
    ``client_gradients`` gives at each model. With B = 1 it is the largest b^2."""
    if not points:
        raise InvalidArgument("no gradients; give what client_gradients returns, at one model or more")
    if not 1 <= B < float("inf"):
        raise InvalidArgument(f"B must be at least 1 and finite, not {B!r}; with B = 1, G^2 is the largest b^2")
    excess = [dissimilarity(gradients) - (B**2 - 1) * float((gradients.mean(0) ** 2).sum()) for gradients in points]
    return Bounded(max(0.0, *excess), float(B))


def diversity(points: Sequence[Tensor]) -> NDArray[np.float64]:
    """Return delta_i, the largest |grad f_i - grad f|^2 over the points, for every client; f is the plain mean."""
    if not points:
        raise InvalidArgument("no gradients; give what client_gradients returns, at one model or more")
    distances = [((gradients - gradients.mean(0)) ** 2).sum(1) for gradients in points]
    return torch.stack(distances).amax(0).double().numpy()
