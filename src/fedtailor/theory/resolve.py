"""``resolve`` puts numbers in the place of words such as "theory"; which ones, each method says (``Algorithm.resolve``)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument
from fedtailor.task import Task
from fedtailor.theory import partial, rates
from fedtailor.theory.constants import Constants, constants
from fedtailor.theory.rates import Split


@dataclass(frozen=True, eq=False)
class Problem:
    """A task, the clients and a run's options, and what the papers say about them.

    ``cohort`` is the number of clients per round. ``rates`` and ``partial`` are the theorems as functions: methods stand below
    this room and cannot import them.
    """

    task: Task
    federation: Federation
    rounds: int
    cohort: int
    batch_size: int | None
    weights: str

    rates: ClassVar[ModuleType] = rates
    partial: ClassVar[ModuleType] = partial

    def constants(self, weight_decay: float = 0.0) -> Constants:
        """Strong convexity and smoothness of the clients' risks; refused for a model where they are not known."""
        self._check_weights()
        return constants(self.task, self.federation, weight_decay)

    def _check_weights(self) -> None:
        if self.federation.train.weights is not None:
            raise InvalidArgument(
                "the theory's step sizes are for rows that count alike, and these have weights; give lr and steps"
            )

    def split(self, mine: Collection[str], weight_decay: float = 0.0) -> Split:
        """Return what PARTIAL's theorems ask about the problem with the personal part ``mine``."""
        self._check_weights()
        return rates.split_constants(self.task, self.federation, mine, self.batch_size, weight_decay)


def resolve(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    rounds: int = 1,
    cohort: int | None = None,
    batch_size: int | None = None,
    weights: str = "uniform",
) -> tuple[Algorithm, Constants | None]:
    """Return the algorithm with the theory's steps, or a step that depends on the clients, filled in where it asks for them.

    ``rounds``, ``cohort`` (the number of clients per round; None: all) and the rest are those of the run.
    """
    return algorithm.resolve(Problem(task, federation, rounds, cohort or len(federation), batch_size, weights))
