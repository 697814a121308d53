"""What FedAvgM, FedAdam and FedYogi have in common: FedAvg's clients under a server with memory.

The mean delta of a round is the server's (negative) gradient. Buffers take the mean as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, param
from fedtailor.local import descend


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(Algorithm, ABC):
    """A method adds ``init_memory`` and ``step``."""

    server_lr: float = param(1.0, gt=0)

    family = "one model for all"

    @abstractmethod
    def init_memory(self, model: Any) -> Any:
        """The server's memory for the trainable parameters."""

    @abstractmethod
    def step(self, memory: Any, delta: Any) -> tuple[Any, Any]:
        """(memory, change of the parameters) for a round's mean delta."""

    def init_server(self, task):
        model = task.init()
        return {"model": model}, self.init_memory(tree.trainable(model))

    def client_update(self, task, shared, personal, data, rnd):
        model = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"delta": tree.sub(model, shared["model"])}, personal

    def server_update(self, task, shared, server, upload, rnd):
        memory, change = self.step(server, tree.trainable(upload["delta"]))
        return {"model": tree.add(shared["model"], {**upload["delta"], **change})}, memory

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)


def moments(model: Any, tau: float) -> Any:
    """Return the memory with which an adaptive server starts: first moment 0, second moment tau^2."""
    return {"m": tree.zeros(model), "v": tree.map(lambda leaf: torch.full_like(leaf, tau**2), model)}


def adaptive(m: Any, v: Any, lr: float, tau: float) -> tuple[Any, Any]:
    """Return (memory, change of the parameters), which is lr m / (sqrt(v) + tau)."""
    return {"m": m, "v": v}, tree.map(lambda a, b: lr * a / (b.sqrt() + tau), m, v)
