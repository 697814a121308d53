"""``engine="auto"``: linear models are vectorized; for others, time two steps of each engine on the first cohort.

A choice by timing may fall out differently from run to run, and with it the last digits; ask for an engine by name where they
matter.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from fedtailor.algorithms.base import Round
from fedtailor.engine.base import Engine, Ids, Plan
from fedtailor.engine.loop import WORTH_A_POOL, LoopEngine
from fedtailor.engine.pool import cores
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import Diverged
from fedtailor.runs.store import Store
from fedtailor.server.reduce import nothing

SAMPLE = 32  # clients that the vectorized engine is tried on
SLOW = 0.5  # seconds per client and step beyond which stacking clients cannot pay


def choose(plan: Plan, shared: Any, ids: Ids, workers: int | None) -> tuple[Engine, str]:
    """(engine, why)."""
    if plan.task.gradient is not None:
        return VectorizedEngine(plan), "vectorized: a linear model, gradient in closed form"
    trial = replace(plan, feed=plan.feed.like({name: work.taking(2) for name, work in plan.feed.phases.items()}))
    few = ids[:: max(1, len(ids) // SAMPLE)][:SAMPLE]
    alone = _seconds(LoopEngine(trial, workers=1), shared, few[: min(2, len(few))])
    whole = alone / 2 * float(plan.feed.steps(ids, "train").sum())  # seconds of a round in one process
    hands = workers or (min(cores(), len(ids)) if whole > WORTH_A_POOL else 1)
    if alone > 2 * SLOW:
        return LoopEngine(plan, workers), f"loop: {alone / 2:.2f} s per client and step, too large a model to stack"
    try:
        stacked = _seconds(VectorizedEngine(trial), shared, few)
    except Diverged:
        raise
    except Exception as error:  # vmap refuses models in many ways, each with its own exception
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return LoopEngine(plan, workers), f"loop: this model cannot be vectorized ({first})"
    figures = f"{1e3 * alone / 2:.2f} ms per client and step in the loop, {1e3 * stacked / 2:.2f} ms vectorized"
    if stacked < alone / hands:
        return VectorizedEngine(plan), f"vectorized: {figures}"
    return LoopEngine(plan, workers), f"loop: {figures}, {hands} {'process' if hands == 1 else 'processes'}"


def _seconds(engine: Engine, shared: Any, ids: Ids) -> float:
    """Best time per client over two goes (the first warms up)."""
    rnd = Round(number=0, clients=len(engine.plan.federation), cohort=len(ids))
    times = []
    for _ in range(2):
        began = time.perf_counter()
        engine.round(shared, np.asarray(ids), rnd, Store(len(engine.plan.federation)), nothing)
        times.append(time.perf_counter() - began)
    return min(times) / len(ids)
