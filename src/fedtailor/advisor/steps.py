"""Local work and step sizes where the user gives none."""

from __future__ import annotations

from typing import Any

from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument
from fedtailor.task import Task
from fedtailor.theory.constants import constants


def work_of(batch_size: int | None, steps: int | None, epochs: int | None) -> dict[str, Any]:
    if steps is not None and epochs is not None:
        raise InvalidArgument("give steps or epochs, not both")
    if steps is None and epochs is None:
        return {"steps": 10} if batch_size is None else {"epochs": 2}
    return {"steps": steps} if steps is not None else {"epochs": epochs}


def smoothness_of(task: Task, federation: Federation) -> float | None:
    """L of the clients' risks for a linear model, otherwise None."""
    return None if task.gradient is None else constants(task, federation, 1e-3).smoothness


def short(value: float) -> float:
    """With four digits, to be read and typed; a step is never made longer than by a thousandth."""
    return float(f"{value:.4g}")
