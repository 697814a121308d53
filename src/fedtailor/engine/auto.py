"""``engine="auto"``: linear models are vectorized; for others, time two steps of each engine on the first cohort.

A choice by timing may fall out differently from run to run, and with it the last digits; ask for an engine by name where they
matter.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from fedtailor.algorithms import origin
from fedtailor.engine.base import Engine, Ids, Plan
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.pool import TIMEOUT, cores
from fedtailor.engine.processes import pays
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import Diverged
from fedtailor.runs.store import Store
from fedtailor.server.reduce import nothing
from fedtailor.task.device import backend

SAMPLE = 32  # clients that the vectorized engine is tried on
SLOW = 0.5  # seconds per client and step beyond which stacking clients cannot pay


def choose(plan: Plan, shared: Any, ids: Ids, rounds: int, workers: int | None, timeout: float = TIMEOUT) -> tuple[Engine, str]:
    """Return the engine to use for so many rounds, and why."""
    if plan.task.gradient is not None and origin.of(type(plan.algorithm)) is None:
        return VectorizedEngine(plan), "vectorized: a linear model, gradient in closed form"
    trial = replace(plan, feed=plan.feed.like({name: work.taking(2) for name, work in plan.feed.phases.items()}))
    few = ids[:: max(1, len(ids) // SAMPLE)][:SAMPLE]
    loop_seconds = _seconds(LoopEngine(trial, workers=1), shared, few[: min(2, len(few))])
    round_seconds = loop_seconds / 2 * float(plan.feed.steps(ids, "train").sum())  # seconds of a round in one process
    processes = 1 if plan.host else workers or (min(cores(), len(ids)) if pays(round_seconds, rounds * round_seconds) else 1)
    if loop_seconds > 2 * SLOW:
        return LoopEngine(plan, workers, timeout), f"loop: {loop_seconds / 2:.2f} s per client and step, too large to stack"
    try:
        stacked_seconds = _seconds(VectorizedEngine(trial), shared, few)
    except Diverged:
        raise
    except Exception as error:  # vmap refuses models in many ways, each with its own exception
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return LoopEngine(plan, workers, timeout), f"loop: this cannot be vectorized ({first})"
    if plan.task.gradient is not None:
        return VectorizedEngine(plan), "vectorized: a linear model, gradient in closed form"
    figures = f"{1e3 * loop_seconds / 2:.2f} ms per client and step in the loop, {1e3 * stacked_seconds / 2:.2f} ms vectorized"
    if stacked_seconds < loop_seconds / processes:
        return VectorizedEngine(plan), f"vectorized: {figures}"
    return LoopEngine(plan, workers, timeout), f"loop: {figures}, {processes} {'process' if processes == 1 else 'processes'}"


def _seconds(engine: Engine, shared: Any, ids: Ids) -> float:
    """Return the best time per client over two tries (the first warms up)."""
    plan, ids = engine.plan, np.asarray(ids)
    times = []
    for _ in range(2):
        store, began = Store(len(plan.federation), device=plan.device), time.perf_counter()
        for exchange in range(plan.algorithm.exchanges):
            engine.round(shared, ids, plan.round(0, 1, ids, exchange), store, nothing)
        backend(plan.device).wait(plan.device)
        times.append(time.perf_counter() - began)
    return min(times) / len(ids)
