"""``run``: check the arguments, build the plan, play the rounds, measure."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtailor import models, tree
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.feed import Feed
from fedtailor.engine.auto import choose
from fedtailor.engine.base import Engine, Ids, Plan, one_thread
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.measure import evaluate, meet_newcomers, on_union, personal_trees
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import Diverged, InvalidArgument
from fedtailor.metrics.client import score_name
from fedtailor.metrics.cost import probe
from fedtailor.metrics.truth import distances, fits, individual_excess_risk
from fedtailor.runs.history import Run
from fedtailor.runs.store import Store
from fedtailor.server.cohort import cohort_size, sample
from fedtailor.task import Task
from fedtailor.task.losses import BY_KIND
from fedtailor.theory.rates import resolve

ENGINES = ("auto", "loop", "vectorized")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@one_thread()
def run(
    algorithm: Algorithm,
    federation: Federation,
    model: str | nn.Module | Task = "linear",
    *,
    rounds: int = 100,
    batch_size: int | None = None,
    cohort: float | int = 1.0,
    seed: int = 0,
    engine: str = "auto",
    workers: int | None = None,
    dtype: str = "float32",
    task: str | None = None,
    bias: bool = True,
    weights: str = "uniform",
    evaluate_every: int | None = None,
    new_clients: float = 0.0,
    out: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    callback: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Train ``algorithm`` on ``federation`` and measure it.

    ``batch_size=None`` is the full batch. ``cohort`` is the share of clients that take part in a round, or their number.
    ``weights`` are uniform or by training size. ``evaluate_every`` counts rounds (0: only at the end; None: about twenty times).
    ``new_clients`` holds out that share of the clients: never trained on, they meet the final model, do one round of local
    work, and are reported apart. ``callback`` is given every round's record. The result does not depend on ``workers``, and
    on ``engine`` only in the last digits.
    """
    _check(algorithm, federation, rounds, batch_size, seed, engine, workers, dtype, weights, evaluate_every, new_clients, device)
    if out is not None:
        _claim(Path(out))
    began = time.perf_counter()
    federation = federation.to(DTYPES[dtype]).as_task(task or federation.kind)
    what = build_task(model, federation, seed, DTYPES[dtype], bias)
    newcomers = _newcomers(federation, new_clients, seed)
    learners = federation if newcomers is None else federation.take(np.setdiff1d(np.arange(len(federation)), newcomers))
    algorithm, found = resolve(algorithm, what, learners)
    size = cohort_size(cohort, len(learners))
    if algorithm.needs_everyone and size < len(learners):
        raise InvalidArgument(f"{type(algorithm).__name__} needs all clients in every round; use cohort=1.0")
    plan = make_plan(algorithm, what, learners, batch_size, seed, weights)
    facts = probe(algorithm, what, plan.feed)
    every = max(1, rounds // 20) if evaluate_every is None else evaluate_every

    shared, server = algorithm.init_server(what)
    store = Store(len(learners))
    chosen, why = _engine(engine, plan, shared, workers, size, seed)
    with chosen:
        records: list[dict[str, Any]] = []
        started = time.perf_counter()
        for rnd, now in play(chosen, shared, server, store, rounds, size, seed):
            shared, server = now
            talking = 0 if algorithm.silent(rnd) else rnd.cohort
            record = {
                "round": rnd.number,
                "cohort": rnd.cohort,
                "bytes_down": facts["bytes_down"] * talking,
                "bytes_up": facts["bytes_up"] * talking,
                "seconds": time.perf_counter() - started,
            }
            is_last = rnd.number + 1 == rounds
            if is_last or (every and (rnd.number + 1) % every == 0):
                measured, clients = evaluate(chosen, shared, store)
                record |= measured
            records.append(record)
            if callback is not None:
                callback(record)
            started = time.perf_counter()
        summary = {
            "algorithm": type(algorithm).__name__,
            "dataset": federation.name,
            "clients": len(learners),
            "rounds": rounds,
            "seed": seed,
            "engine": chosen.name,
            "engine_reason": why,
            "workers": chosen.processes if isinstance(chosen, LoopEngine) else 1,
            **measured,
            **on_union(chosen, shared, store, seed),
            "trained_parameters": facts["trained_parameters"],
            "personal_parameters": tree.size(chosen.personal(shared, 0, store)),
            "bytes_down": sum(r["bytes_down"] for r in records),
            "bytes_up": sum(r["bytes_up"] for r in records),
            "epsilon": None,
            **_best(records, score_name(what.kind)),
            **({} if found is None else {"mu": found.mu, "smoothness": found.smoothness}),
            **_against_truth(chosen, shared, store, clients),
        }
    outside = None
    if newcomers is not None:
        others = make_plan(algorithm, what, federation.take(newcomers), batch_size, seed, weights)
        found_outside, outside = meet_newcomers(others, shared, rounds)
        summary |= found_outside
    summary["seconds"] = time.perf_counter() - began
    finished = Run(algorithm, what, federation, shared, server, store, chosen, outside, records, clients, summary)
    if out is not None:
        save(finished, Path(out))
    return finished


def play(
    engine: Engine, shared: Any, server: Any, store: Store, rounds: int, size: int, seed: int
) -> Iterator[tuple[Round, tuple[Any, Any]]]:
    """The rounds, one by one: (round, (shared, server) after it). Personal state goes to ``store``."""
    plan = engine.plan
    for number in range(rounds):
        ids = cohort_of(plan.federation, plan.algorithm, size, seed, number)
        rnd = round_of(number, rounds, plan, ids)
        upload = engine.round(shared, ids, rnd, store)
        shared, server = plan.algorithm.server_update(plan.task, shared, server, upload, rnd)
        _check_server(shared, rnd)
        yield rnd, (shared, server)


def build_task(model: str | nn.Module | Task, federation: Federation, seed: int, dtype: torch.dtype, bias: bool) -> Task:
    """The task for a model given by name, as a module or as a task, checked against the data."""
    if isinstance(model, Task):
        made = replace(model, init=lambda: tree.map(lambda t: t.to(dtype) if t.is_floating_point() else t, model.init()))
    else:
        if isinstance(model, str):
            shape = tuple(federation.train.x.shape[1:])
            module = models.build(model, shape, federation.outputs, seed=seed, bias=bias)
        elif isinstance(model, nn.Module):
            module = copy.deepcopy(model)
        else:
            raise InvalidArgument(f"model must be a name, a torch.nn.Module or a Task, not {type(model).__name__}")
        made = Task.from_module(module.to(dtype), BY_KIND[federation.kind].name, classes=federation.labels)
    if made.kind != federation.kind:
        raise InvalidArgument(
            f"the task's loss is for {made.kind} but the data are for {federation.kind}; pass task={made.kind!r} or another loss"
        )
    if made.public is None and federation.public is not None:
        made = replace(made, public=federation.public)
    made.check_fit(federation.train.x, federation.train.y, federation.labels)
    return made


def _claim(folder: Path) -> None:
    """Make the run directory before any work is done; refuse one that holds another run."""
    if (folder / "summary.json").exists():
        raise InvalidArgument(f"{folder} holds another run; give out= a new directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"cannot write to {folder} ({error.strerror}); give out= a directory you may write to") from error


def save(finished: Run, folder: Path) -> None:
    """The run directory: history.jsonl, summary.json, checkpoints/shared.safetensors; each file whole or not at all."""
    lines = [*finished.history, *({"client": c} | m for c, m in finished.per_client())]
    files = {
        "history.jsonl": "".join(json.dumps(line) + "\n" for line in lines).encode(),
        "checkpoints/shared.safetensors": tree.pack(finished.shared),
        "summary.json": (json.dumps(finished.summary, indent=2) + "\n").encode(),
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(path.suffix + ".part")
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)


def make_plan(algorithm: Algorithm, task: Task, federation: Federation, batch_size: int | None, seed: int, weights: str) -> Plan:
    sizes = federation.train.sizes
    share = sizes / sizes.sum() if weights == "size" else np.full(len(federation), 1 / len(federation))
    return Plan(algorithm, task, federation, Feed(federation, algorithm.work(), batch_size, seed), share)


def cohort_of(federation: Federation, algorithm: Algorithm, size: int, seed: int, number: int) -> Ids:
    if algorithm.roll_call and number == 0:
        return np.arange(len(federation))
    return federation.order[sample(len(federation), size, seed, number)]


def round_of(number: int, rounds: int, plan: Plan, ids: Ids) -> Round:
    clients = len(plan.federation)
    mass = clients / len(ids) * float(plan.weights[ids].sum()) if len(ids) < clients else 1.0
    cohort = plan.weights[ids[np.argsort(plan.federation.keys[ids], kind="stable")]]  # in the order uploads are stacked
    return Round(number, rounds, clients, len(ids), mass, torch.from_numpy(cohort / cohort.sum()), plan.feed.seed)


def _engine(name: str, plan: Plan, shared: Any, workers: int | None, size: int, seed: int) -> tuple[Engine, str]:
    if name == "vectorized":
        return VectorizedEngine(plan), "asked for"
    if name == "loop":
        return LoopEngine(plan, workers), "asked for"
    return choose(plan, shared, cohort_of(plan.federation, plan.algorithm, size, seed, 0), workers)


def _newcomers(federation: Federation, share: float, seed: int) -> Ids | None:
    if share == 0:
        return None
    count = max(1, round(share * len(federation)))
    if count >= len(federation):
        raise InvalidArgument(f"new_clients={share} leaves none of the {len(federation)} clients to train on; use less")
    drawn = rng.generator(seed, "new clients").choice(len(federation), count, replace=False)
    return np.sort(federation.order[drawn])


def _check_server(shared: Any, rnd: Round) -> None:
    for path, leaf in tree.items(shared):
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise Diverged(rnd.number, ["the server"], f"the shared {path}")


def _against_truth(engine: Engine, shared: Any, store: Store, clients: dict[str, Any]) -> dict[str, Any]:
    """Distances and excess risks where the truth is known and is a model of the task's shape; adds ``ier`` to the clients."""
    federation, task = engine.plan.federation, engine.plan.task
    if federation.truth is None or not fits(task, federation.truth[0]):
        return {}
    clients["ier"] = individual_excess_risk(task, federation, clients["loss_personal"])
    aer = float(np.dot(engine.plan.weights, clients["ier"]))
    return {"aer": aer, **distances(federation.truth, shared, personal_trees(engine, shared, store))}


def _best(records: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The evaluated round that is best on validation, and what it gave on test (never the best on test)."""
    judged = [r for r in records if r.get(f"val_{name}_personal") is not None]
    if not judged:
        return {"best_round": None}
    sign = 1 if name == "mse" else -1
    best = min(judged, key=lambda r: sign * r[f"val_{name}_personal"])
    return {
        "best_round": best["round"],
        f"best_val_{name}_personal": best[f"val_{name}_personal"],
        f"best_{name}_personal": best[f"{name}_personal"],
        f"best_{name}_global": best[f"{name}_global"],
    }


def _check(
    algorithm: Any,
    federation: Any,
    rounds: Any,
    batch_size: Any,
    seed: Any,
    engine: Any,
    workers: Any,
    dtype: Any,
    weights: Any,
    evaluate_every: Any,
    new_clients: Any,
    device: Any,
) -> None:
    if not isinstance(algorithm, Algorithm):
        hint = "; create it first, for instance ft.FedAvg()" if isinstance(algorithm, type) else ""
        raise InvalidArgument(f"algorithm must be an Algorithm, not {algorithm!r}{hint}")
    if not isinstance(federation, Federation):
        raise InvalidArgument(f"federation must be a Federation (see Federation.from_arrays), not {type(federation).__name__}")
    for name, value, least in (
        ("rounds", rounds, 1),
        ("batch_size", batch_size, 1),
        ("workers", workers, 1),
        ("evaluate_every", evaluate_every, 0),
        ("seed", seed, 0),
    ):
        if value is None and name in ("batch_size", "workers", "evaluate_every"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise InvalidArgument(f"{name} must be a whole number of at least {least}, not {value!r}")
    for name, value, known in (
        ("engine", engine, ENGINES),
        ("dtype", dtype, tuple(DTYPES)),
        ("weights", weights, ("uniform", "size")),
        ("device", device, ("cpu",)),
    ):
        if value not in known:
            raise InvalidArgument(f"{name} must be one of {', '.join(known)}, not {value!r}")
    if not isinstance(new_clients, (int, float)) or not 0 <= new_clients < 1:
        raise InvalidArgument(f"new_clients must be a share in [0, 1), not {new_clients!r}")
