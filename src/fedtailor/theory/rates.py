"""Step sizes and rates that the papers prove."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import NamedTuple

from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument
from fedtailor.task import Task
from fedtailor.theory.constants import Constants, constants


class Steps(NamedTuple):
    lr: float
    server_lr: float
    steps: int


def fedclup_steps(lam: float, mu: float, smoothness: float) -> Steps:
    """CLUP Corollary 2: eta = 1/(lam + L), gamma = (lam + L)/(2 lam L), K >= 2 + (lam + L)/(lam + mu) log(1056 kappa^2)."""
    if lam <= 0:
        raise InvalidArgument("steps='theory' needs lam > 0 (with lam = 0 nothing is shared; use Local)")
    kappa = smoothness / mu
    local = 2 + (lam + smoothness) / (lam + mu) * math.log(1056 * kappa**2)
    return Steps(1 / (lam + smoothness), (lam + smoothness) / (2 * lam * smoothness), math.ceil(local))


def fedclup_rate(lam: float, mu: float, smoothness: float) -> float:
    """CLUP Corollary 2: factor by which the squared error of g falls per round."""
    return 1 - (lam + smoothness) / (4 * smoothness / mu * (lam + mu))


def resolve(algorithm: Algorithm, task: Task, federation: Federation) -> tuple[Algorithm, Constants | None]:
    """An algorithm that asks for the theory's steps, with them filled in."""
    if algorithm.steps != "theory":
        return algorithm, None
    found = constants(task, federation, algorithm.opt.weight_decay)
    known = {f.name for f in fields(algorithm)}
    if "smoothness" in known:  # the method works out its steps from the constants
        return replace(algorithm, steps=None, mu=found.mu, smoothness=found.smoothness), found  # type: ignore[call-arg]
    lam: float = algorithm.lam  # type: ignore[attr-defined]
    return replace(algorithm, **fedclup_steps(lam, found.mu, found.smoothness)._asdict()), found
