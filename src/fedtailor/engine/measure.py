"""Evaluation: reads the state of a run, changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.algorithms.base import Round
from fedtailor.data import rng
from fedtailor.data.federation import Split
from fedtailor.engine.base import Engine, Plan
from fedtailor.engine.loop import LoopEngine
from fedtailor.metrics.client import accuracy_on, measure, score_name
from fedtailor.metrics.spread import summarize
from fedtailor.runs.store import Store
from fedtailor.server.reduce import nothing

Columns = dict[str, NDArray[np.float64]]
UNION_CLIENTS, UNION_PREDICTIONS = 1_000, 1_000_000  # beyond these the union test is on a seeded sample, and says so


def evaluate(engine: Engine, shared: Any, store: Store) -> tuple[dict[str, Any], Columns]:
    """(summary of the test split, with validation's main measures as ``val_*``; per-client columns of the test split)."""
    plan = engine.plan
    clients = _columns(engine, shared, store, plan.federation.test)
    out = summarize(plan.task.kind, clients)
    if plan.federation.val is not None:
        val = summarize(plan.task.kind, _columns(engine, shared, store, plan.federation.val))
        name = score_name(plan.task.kind)
        out |= {f"val_{name}_personal": val[f"{name}_personal"], f"val_{name}_global": val[f"{name}_global"]}
    return out, clients


def _columns(engine: Engine, shared: Any, store: Store, split: Split) -> Columns:
    count = len(engine.plan.federation)
    columns: Columns = {}
    for ids, own, common, y, mask in engine.predictions(shared, np.arange(count), store, split):
        for name, values in measure(engine.plan.task, own, common, y, mask).items():
            columns.setdefault(name, np.full(count, np.nan))[ids] = values
    return columns


def on_union(engine: Engine, shared: Any, store: Store, seed: int) -> dict[str, Any]:
    """Personal models on the union of the test splits, mean over clients; sampled where the product would be too large."""
    plan = engine.plan
    test, count = plan.federation.test, len(plan.federation)
    rows, ids = np.arange(len(test.y)), np.arange(count)
    draw = rng.generator(seed, "union")
    if count > UNION_CLIENTS:
        ids = np.sort(plan.federation.order[draw.choice(count, UNION_CLIENTS, replace=False)])
    most = max(1, UNION_PREDICTIONS // len(ids))
    if len(rows) > most:
        rows = np.sort(draw.choice(len(rows), most, replace=False))
    x, y = test.x[rows], test.y[rows]
    scores = np.concatenate([accuracy_on(plan.task, logits, y) for _, logits in engine.on_common(shared, ids, store, x)])
    name = score_name(plan.task.kind)
    return {f"{name}_global_test": float(scores.mean()), "union_rows": len(rows), "union_clients": len(ids)}


def personal_trees(engine: Engine, shared: Any, store: Store) -> list[Any]:
    return [engine.personal(shared, i, store) for i in range(len(engine.plan.federation))]


def meet_newcomers(plan: Plan, shared: Any, rounds: int) -> tuple[dict[str, Any], tuple[Engine, Store]]:
    """Clients never trained on: born with the final shared state, one round of local work, nothing sent back.

    (What they are measured at, the engine and store to predict for them.)
    """
    store, ids = Store(len(plan.federation)), np.arange(len(plan.federation))
    engine = LoopEngine(plan, workers=1)
    engine.round(shared, ids, Round(rounds, rounds, len(ids), len(ids)), store, nothing)
    found, _ = evaluate(engine, shared, store)
    name = score_name(plan.task.kind)
    keep = (f"{name}_personal", f"{name}_global", "share_benefit", "worst_decile")
    return {"new_clients": len(ids), **{f"new_{k}": found[k] for k in keep}}, (engine, store)
