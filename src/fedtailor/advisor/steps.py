"""Local work and step sizes where the user gives none."""

from __future__ import annotations

from typing import Any

from fedtailor.data.federation import Federation
from fedtailor.engine.options import AdviceOptions, Options, SweepOptions
from fedtailor.errors import InvalidArgument
from fedtailor.task import Task
from fedtailor.theory.constants import constants


def work_of(options: AdviceOptions | SweepOptions) -> dict[str, Any]:
    """Return the steps or epochs of a round; unless given, ten steps on all rows or two epochs on batches."""
    if options.steps is not None and options.epochs is not None:
        raise InvalidArgument("give steps or epochs, not both")
    if options.steps is None and options.epochs is None:
        return {"steps": 10} if options.batch_size is None else {"epochs": 2}
    return {"steps": options.steps} if options.steps is not None else {"epochs": options.epochs}


def training(options: AdviceOptions | SweepOptions) -> Options:
    """Return the options with which a method is run on the task of ``task_and_rows``, which has started from the backbone already
    and knows its score."""
    return Options.of(
        {
            name: value
            for name, value in options.plain().items()
            if name in Options.model_fields and name not in ("backbone", "score")
        }
    )


def smoothness_of(task: Task, federation: Federation) -> float | None:
    """L of the clients' risks for a linear model, otherwise None."""
    return None if task.gradient is None else constants(task, federation, 1e-3).smoothness


def four_digits(value: float) -> float:
    """``value`` rounded to four significant digits, to be read and typed; it changes by less than a thousandth."""
    return float(f"{value:.4g}")
