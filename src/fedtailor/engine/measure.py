"""Evaluation: reads the state of a run, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import Round
from fedtailor.data import rng, shift
from fedtailor.data.split import Split
from fedtailor.engine.base import Engine, Plan
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.prefix import through
from fedtailor.errors import InvalidData
from fedtailor.metrics.client import accuracy_on, hits, measure, score_name
from fedtailor.metrics.cost import work_of_prediction
from fedtailor.metrics.routes import spread_of
from fedtailor.metrics.spread import summarize
from fedtailor.runs.history import Run
from fedtailor.runs.store import Store
from fedtailor.server.reduce import nothing
from fedtailor.task.parts import joined

Columns = dict[str, NDArray[np.float64]]
UNION_CLIENTS, UNION_PREDICTIONS = 1_000, 1_000_000  # beyond these the union test is on a seeded sample, and says so
SHIFT_PREDICTIONS = 200_000  # the same for each corruption
PUBLIC_ROWS = 1_000  # of the public rows on which personal and shared predictions are compared
ROUTED_CLIENTS = 200  # beyond these the routes of a seeded sample are looked at


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
    for ids, own, common, y, mask, _ in engine.predictions(shared, np.arange(count), store, split):
        for name, values in measure(engine.plan.task, own, common, y, mask).items():
            columns.setdefault(name, np.full(count, np.nan))[ids] = values
    return columns


def on_union(engine: Engine, shared: Any, store: Store, seed: int, also: Split | None = None, most: int = 0) -> dict[str, Any]:
    """Personal models on the union of the test splits (or of another), mean over clients; sampled where the product would be
    too large."""
    plan = engine.plan
    test = also or plan.federation.test
    each = test.y.shape[1] if test.y.dim() > 1 else 1  # predictions for a row
    rows, ids = _sampled(plan, len(test.y), seed, "union", (most or UNION_PREDICTIONS) // each)
    x, y = test.x[rows], test.y[rows]
    scores = np.concatenate([accuracy_on(plan.task, logits, y) for _, logits in engine.on_common(shared, ids, store, x)])
    name = score_name(plan.task.kind)
    return {f"{name}_global_test": float(scores.mean()), "union_rows": len(rows), "union_clients": len(ids)}


@torch.no_grad()
def routing(engine: Engine, shared: Any, store: Store, seed: int) -> dict[str, Any]:
    """Where a method routes rows: the probability of the shared path by route and by which of the two models gets a test row
    right, over rows of all clients (``metrics.routes``), and what a prediction costs. Nothing where it does not route."""
    plan = engine.plan
    task, algorithm = plan.task, plan.algorithm
    if not algorithm.routed:
        return {}
    ids = np.arange(len(plan.federation))
    if len(ids) > ROUTED_CLIENTS:
        ids = np.sort(plan.federation.order[rng.generator(seed, "routes").choice(len(ids), ROUTED_CLIENTS, replace=False)])
    test = plan.federation.test
    parts: list[list[Tensor]] = [[], [], [], []]  # q, which rows the personal and the shared model get right, kinds
    for found in engine.predictions(shared, ids, store, test, routes=True):
        assert found.routes is not None
        assert found.shared is not None
        right = [hits(task.kind, logits, found.y) for logits in (found.personal, found.shared)]
        real = found.mask > 0
        for part, values in zip(parts, (found.routes[..., 0], *right), strict=False):
            part.append(values[real])
        if test.kinds is not None:
            parts[3] += [test.kinds[int(test.offsets[i]) : int(test.offsets[i + 1])] for i in found.ids]
    x, personal = test.client(int(ids[0]))[0], engine.personal(shared, int(ids[0]), store)
    own, common = (work_of_prediction(algorithm, task, shared, p, x) // len(x) for p in (personal, engine.newborn(shared)))
    q, mine, theirs = (torch.cat(part).double().numpy() for part in parts[:3])
    spread = spread_of(task.kind, q, mine, theirs, torch.cat(parts[3]).numpy() if parts[3] else None)
    blocks = [block.name for block in joined(task.blocks)]
    sizes = {"model_parameters": tree.size(task.init()), "router_parameters": tree.size(shared.get("router", {}))}
    work = {"multiply_adds_personal": own, "multiply_adds_shared": common}
    count = q.shape[1]
    names = blocks if len(blocks) == count else [f"layer {j}" for j in range(1, count + 1)]
    if getattr(algorithm, "routing", "layer") == "model":
        names = ["whole model"]
    return {"routing": {"clients": len(ids), "routes": names, **spread, **sizes, **work}}


def _sampled(plan: Plan, count: int, seed: int, what: str, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(rows, clients): all, or a seeded sample where there are too many clients or more than ``most`` pairs."""
    rows, ids = np.arange(count), np.arange(len(plan.federation))
    draw = rng.generator(seed, what)
    if len(ids) > UNION_CLIENTS:
        ids = np.sort(plan.federation.order[draw.choice(len(ids), UNION_CLIENTS, replace=False)])
    each = max(1, most // len(ids))
    return np.sort(draw.choice(count, each, replace=False)) if count > each else rows, ids


def on_public(engine: Engine, shared: Any, store: Store, seed: int) -> dict[str, Any]:
    """``personal_distance``: mean over clients and public rows of min(1, ||p_i(x) - g(x)||_1), p_i and g the personal and shared
    models' class probabilities (PerAda, Theorem 2); nothing where there are no public rows, classes or personal models."""
    plan = engine.plan
    public = plan.task.public
    if public is None or plan.task.kind != "classification" or plan.stateless() or not tree.leaves(shared):
        return {}
    rows, ids = _sampled(plan, len(public), seed, "public", PUBLIC_ROWS * min(len(plan.federation), UNION_CLIENTS))
    x = public[rows]
    with torch.no_grad():
        common = plan.algorithm.predict(plan.task, shared, engine.newborn(shared), x).softmax(-1)
        apart = [(own.softmax(-1) - common).abs().sum(-1).clamp(max=1) for _, own in engine.on_common(shared, ids, store, x)]
    return {"personal_distance": float(torch.cat(apart).mean())}


def on_shifted(run: Run, spec: str, seed: int = 0) -> dict[str, Any]:
    """A finished run on corrupted test images, as ``contrast:3``: on the clients' own and on the union; or on ``cifar10.1``."""
    engine = cast(Engine, run.engine)
    learners = [run.federation.index(name) for name in engine.plan.federation.names]
    like = run.federation.train.x
    own: dict[str, Any] = {}
    if spec == shift.CIFAR10_1:
        x, y = shift.cifar10_1((run.federation.recipe or {}).get("data_dir"))
        test = Split(torch.from_numpy(x).to(like), torch.from_numpy(y), np.array([0, len(y)]))
        if x.shape[1:] != tuple(like.shape[1:]):
            raise InvalidData(f"{spec} has images of shape {x.shape[1:]} and the clients' are {tuple(like.shape[1:])}")
    else:
        test = shift.corrupt(run.federation.take(learners), *shift.parse(spec), seed).test
    if engine.plan.task is not run.task:
        test = replace(test, x=through(run.task, test.x))
    if spec != shift.CIFAR10_1:
        name, found = score_name(run.task.kind), summarize(run.task.kind, _columns(engine, run.shared, run.store, test))
        own = {key: found[key] for key in (f"{name}_personal", f"{name}_global")}
    return {**own, **on_union(engine, run.shared, run.store, seed, test, SHIFT_PREDICTIONS)}


def shifted_tests(run: Run, specs: Sequence[str]) -> dict[str, Any]:
    """Every shift by name, and the personal models on the union of the corrupted tests, mean over the shifts."""
    found = {spec: on_shifted(run, spec) for spec in specs}
    key = f"{score_name(run.task.kind)}_global_test"
    mean = float(np.mean([measured[key] for measured in found.values()]))
    return {key.replace("global", "shifted"): mean, "shifted": found}


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
