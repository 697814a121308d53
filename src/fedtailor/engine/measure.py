"""Evaluation: reads the state of a run, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import Seen, opened
from fedtailor.data import rng, shift
from fedtailor.data.split import Split
from fedtailor.engine.base import Engine, Ids, Plan, Sent, row
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.mixed import by_architecture
from fedtailor.engine.prefix import through
from fedtailor.errors import InvalidData
from fedtailor.metrics import threshold
from fedtailor.metrics.client import accuracy_on, measure, scored
from fedtailor.metrics.cost import work_of_prediction
from fedtailor.metrics.rows import spread_of
from fedtailor.metrics.spread import judged_by, on_validation, summarize
from fedtailor.runs.history import Run
from fedtailor.runs.store import Store
from fedtailor.server.reduce import nothing

Columns = dict[str, NDArray[np.float64]]
UNION_CLIENTS, UNION_PREDICTIONS = 1_000, 1_000_000  # beyond these the union test is on a seeded sample, and says so
SHIFT_PREDICTIONS = 200_000  # the same for each corruption
ALL_ROWS = 20_000_000  # outputs of all test rows that are held at once
PUBLIC_ROWS = 1_000  # of the public rows on which personal and shared predictions are compared
DIAGNOSED_CLIENTS = 200  # beyond these a seeded sample is diagnosed


def evaluate(
    engine: Engine, shared: Any, store: Store, final: bool = True, sample: Ids | None = None
) -> tuple[dict[str, Any], Columns]:
    """Return (summary of the test split, with validation's main measures as ``val_*``; per-client columns of the test split, with
    what methods are chosen by on validation), of all clients or of a ``sample`` (in its order)."""
    plan = engine.plan
    clients = _columns(engine, shared, store, plan.federation.test, final, sample)
    out = summarize(plan.task.kind, clients, plan.task.score)
    if plan.federation.val is not None:
        means, judged = validate(engine, shared, store, sample)
        out |= means
        clients |= judged_by(judged, plan.task.score)
    return out, clients


def validate(engine: Engine, shared: Any, store: Store, sample: Ids | None = None) -> tuple[dict[str, Any], Columns]:
    """Return (the validation split's main measures as ``val_*``, its per-client columns), of all clients or of a ``sample``."""
    plan = engine.plan
    assert plan.federation.val is not None
    columns = _columns(engine, shared, store, plan.federation.val, False, sample)
    return on_validation(plan.task.kind, columns, plan.task.score), columns


def _columns(engine: Engine, shared: Any, store: Store, split: Split, final: bool = True, sample: Ids | None = None) -> Columns:
    clients = np.arange(len(engine.plan.federation)) if sample is None else sample
    places = np.zeros(len(engine.plan.federation), np.int64)
    places[clients] = np.arange(len(clients))
    alike = clients[np.argsort(split.sizes[clients], kind="stable")]  # with as many rows: they are measured at once
    columns: Columns = {}
    for ids, own, common, y, mask, _ in engine.predictions(shared, alike, store, split):
        for name, values in measure(engine.plan.task, own, common, y, mask, final).items():
            if name not in columns:
                columns[name] = np.full(len(clients), np.nan)
            columns[name][places[ids]] = values
    return columns


def on_union(engine: Engine, shared: Any, store: Store, seed: int, also: Split | None = None, most: int = 0) -> dict[str, Any]:
    """Personal models on the union of the test splits (or of another), mean over clients; sampled where the product would be
    too large."""
    plan = engine.plan
    test = also or plan.on_host.federation.test
    each = test.y.shape[1] if test.y.dim() > 1 else 1  # predictions for a row
    rows, ids = _sampled(plan, len(test.y), seed, "union", (most or UNION_PREDICTIONS) // each)
    x, y = engine.rows(test, rows)
    shown = {metric.name: metric for metric in (plan.task.kind.score, plan.task.score)}
    scores: dict[str, list[NDArray[np.float64]]] = {name: [] for name in shown}
    for some, own in by_architecture(plan.federation, ids, x):
        for _, logits in engine.on_common(shared, some, store, own):
            for name, metric in shown.items():
                scores[name].append(accuracy_on(plan.task, logits, y, metric))
    out = {f"{name}_global_test": float(np.concatenate(parts).mean()) for name, parts in scores.items()}
    known = {key: None if np.isnan(value) else value for key, value in out.items()}
    return {**known, "union_rows": len(rows), "union_clients": len(ids)}


def on_all_rows(engine: Engine, shared: Any, store: Store) -> dict[str, Any]:
    """Return the measures that are no means over rows, on all clients' test rows as one set, each row predicted by its own
    client's model (and by the shared one); nothing where that is too much to hold."""
    task, test = engine.plan.task, engine.plan.on_host.federation.test
    metrics = [metric for metric in task.measured if metric.clients is not None and metric not in task.metrics]
    if len(test.y) * max(1, engine.plan.federation.outputs) > ALL_ROWS or task.kind.per_position(test.y):
        return {}
    parts: dict[str, list[Tensor]] = {"personal": [], "global": [], "y": []}
    for _, own, common, y, mask, _ in engine.predictions(shared, np.arange(len(engine.plan.federation)), store, test):
        real = scored(task, y, mask)
        for name, values in (("personal", own), ("global", common), ("y", y)):
            if values is not None:
                parts[name].append(values[real])
    y, out = torch.cat(parts["y"]).unsqueeze(0), {}
    for side in ("personal", "global"):
        for metric in metrics if parts[side] else ():
            assert metric.clients is not None
            score = metric.clients(torch.cat(parts[side]).unsqueeze(0), y, torch.ones(1, y.shape[1], dtype=torch.bool))
            if score is not None:
                out[f"{metric.name}_rows_{side}"] = None if np.isnan(score[0]) else float(score[0])
    return out


def at_threshold(engine: Engine, shared: Any, store: Store, measure: str | None) -> dict[str, Any]:
    """Return the threshold that is best by ``measure`` on all clients' validation rows, each predicted by its own client's model,
    and what it gives on their test rows; nothing where none was asked for."""
    plan = engine.plan
    if measure is None or plan.federation.val is None:
        return {}
    columns = {}
    for name, split in (("val", plan.federation.val), ("test", plan.federation.test)):
        parts: list[tuple[Tensor, Tensor]] = []
        for _, own, _, y, mask, _ in engine.predictions(shared, np.arange(len(plan.federation)), store, split):
            real = mask > 0
            parts.append((torch.softmax(own[real].double(), -1)[:, 1], y[real] == 1))
        columns[name] = tuple(torch.cat(column).numpy() for column in zip(*parts, strict=True))
    chosen = threshold.choose(measure, *columns["val"])
    if chosen is None:
        return {"threshold": None}
    named = {"class": plan.federation.classes[1]} if plan.federation.classes else {}
    return {"threshold": chosen, "at_threshold": {**threshold.at(chosen, *columns["test"]), **named}}


@torch.no_grad()
def diagnosed(engine: Engine, shared: Any, store: Store, seed: int) -> dict[str, Any]:
    """Return what a method makes of its diagnostics of the test rows (``Algorithm.condense``), and how a report draws it, as
    ``figures``; nothing where it has none."""
    plan = engine.plan.on_host
    task, algorithm, test = plan.task, plan.algorithm, plan.federation.test
    if not algorithm.diagnostics:
        return {}
    ids = np.arange(len(plan.federation))
    if len(ids) > DIAGNOSED_CLIENTS:
        ids = np.sort(plan.federation.order[rng.generator(seed, "routes").choice(len(ids), DIAGNOSED_CLIENTS, replace=False)])
    facts: dict[str, list[Tensor]] = {name: [] for name in algorithm.diagnostics}
    right: list[list[Tensor]] = [[], []]  # which rows the personal and the shared model get right
    kinds: list[Tensor] = []
    for answers in engine.predictions(shared, ids, store, test, diagnose=True):
        assert answers.facts is not None
        real = answers.mask > 0
        for name, parts in facts.items():
            parts.append(answers.facts[name][real])
        for parts, logits in zip(right, (answers.personal, answers.shared), strict=True):
            parts.append(task.kind.hits(answers.personal if logits is None else logits, answers.y)[real])
        if test.kinds is not None:
            kinds += [test.kinds[int(test.offsets[i]) : int(test.offsets[i + 1])] for i in answers.ids]
    x, _ = engine.rows(test, np.arange(*test.offsets[int(ids[0]) :][:2]))
    personal = engine.personal(shared, int(ids[0]), store)
    sent = engine.sent(shared)
    received = engine.out(sent.shared)
    own, common = (work_of_prediction(algorithm, task, received, p, x) // len(x) for p in (personal, engine.newborn(sent)))
    rows, (mine, theirs) = {name: _numbers(parts) for name, parts in facts.items()}, map(_numbers, right)
    known = torch.cat(kinds).numpy() if kinds else None
    spread = partial(spread_of, task.kind, mine=mine, theirs=theirs, kinds=known)
    work = {"multiply_adds_personal": own, "multiply_adds_shared": common}
    condensed = algorithm.condense(Seen(task, received, len(ids), rows, spread, work))
    return condensed | {"figures": algorithm.figures(condensed)}


def _numbers(parts: Sequence[Tensor]) -> NDArray[np.float64]:
    return torch.cat(list(parts)).double().numpy()


def _sampled(plan: Plan, count: int, seed: int, purpose: str, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (rows, clients): all, or a seeded sample where there are too many clients or more than ``most`` pairs."""
    rows, ids = np.arange(count), np.arange(len(plan.federation))
    draw = rng.generator(seed, purpose)
    if len(ids) > UNION_CLIENTS:
        ids = np.sort(plan.federation.order[draw.choice(len(ids), UNION_CLIENTS, replace=False)])
    each = max(1, most // len(ids))
    return np.sort(draw.choice(count, each, replace=False)) if count > each else rows, ids


def on_public(engine: Engine, shared: Any, store: Store, seed: int) -> dict[str, Any]:
    """``personal_distance``: mean over clients and public rows of min(1, ||p_i(x) - g(x)||_1), p_i and g the personal and shared
    models' class probabilities (PerAda, Theorem 2); nothing where there are no public rows, classes or personal models."""
    plan, sent = engine.plan.on_host, engine.sent(shared)
    public = plan.task.public
    if public is None or not plan.task.kind.softmax or plan.algorithm.stateless or not tree.leaves(sent.newcomer):
        return {}
    if plan.federation.packing is not None and plan.federation.packing.mixed:
        return {}  # there is no shared model
    rows, ids = _sampled(plan, len(public), seed, "public", PUBLIC_ROWS * min(len(plan.federation), UNION_CLIENTS))
    x = public[rows]
    with torch.no_grad():
        common = plan.algorithm.predict(plan.task, *opened(engine.out(sent.shared), engine.newborn(sent)), x).softmax(-1)
        apart = [(own.softmax(-1) - common).abs().sum(-1).clamp(max=1) for _, own in engine.on_common(sent, ids, store, x)]
    return {"personal_distance": float(torch.cat(apart).mean())}


def on_shifted(run: Run, spec: str, seed: int = 0) -> dict[str, Any]:
    """Return what a finished run measures on corrupted test images, as ``contrast:3`` (the clients' own, and the union), or on
    ``cifar10.1``."""
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
    if engine.plan.on_host.task is not run.task:
        test = replace(test, x=through(run.task, test.x, engine.plan.device))
    if spec != shift.CIFAR10_1:
        score = run.task.score
        measured = summarize(run.task.kind, _columns(engine, run.sent, run.store, test), score)
        own = {key: measured[key] for key in (f"{score.name}_personal", f"{score.name}_global")}
    return {**own, **on_union(engine, run.sent, run.store, seed, test, SHIFT_PREDICTIONS)}


def shifted_tests(run: Run, specs: Sequence[str]) -> dict[str, Any]:
    """Return every shift by name, and the personal models on the union of the corrupted tests, mean over the shifts."""
    shifted = {spec: on_shifted(run, spec) for spec in specs}
    key = f"{run.task.score.name}_global_test"
    mean = float(np.mean([measured[key] for measured in shifted.values()]))
    return {key.replace("global", "shifted"): mean, "shifted": shifted}


def personal_trees(engine: Engine, shared: Any, store: Store) -> list[Any]:
    """Return the tree with which each client predicts."""
    trees: dict[int, Any] = {}
    for ids, stack in engine.personal_chunks(shared, store):
        trees |= {client: row(stack, place) for place, client in enumerate(ids.tolist())}
    return [trees[client] for client in range(len(trees))]


def meet_newcomers(plan: Plan, sent: Sent, rounds: int) -> tuple[dict[str, Any], tuple[Engine, Store]]:
    """Clients never trained on: born with what the server sends them at the end, one round of local work, nothing sent back.

    (What they are measured at, the engine and store to predict for them.)
    """
    store, ids = Store(len(plan.federation), device=plan.device), np.arange(len(plan.federation))
    engine = LoopEngine(plan, workers=1)
    for exchange in range(plan.algorithm.exchanges):
        engine.round(sent.to_newcomers(), ids, plan.round(rounds, rounds, ids, exchange), store, nothing)
    measured, _ = evaluate(engine, sent.to_newcomers(), store)
    name = plan.task.score.name
    keep = (f"{name}_personal", f"{name}_global", "share_benefit", "worst_decile")
    return {"new_clients": len(ids), **{f"new_{k}": measured[k] for k in keep}}, (engine, store)
