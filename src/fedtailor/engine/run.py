"""``run``: build the plan, play the rounds, measure, and keep it all on disk if asked to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.algorithms.settings import written
from fedtailor.data.federation import Federation
from fedtailor.engine.auto import choose
from fedtailor.engine.base import Engine, Plan, one_thread
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.measure import (
    Columns,
    evaluate,
    meet_newcomers,
    on_public,
    on_union,
    personal_trees,
    routing,
    shifted_tests,
)
from fedtailor.engine.prefix import after_prefix
from fedtailor.engine.private import spent
from fedtailor.engine.setup import (
    DTYPES,
    build_task,
    check,
    check_shift,
    cohort_of,
    make_plan,
    newcomers_of,
    privatized,
    round_of,
    visits_of,
)
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import Diverged, InvalidArgument
from fedtailor.metrics.client import score_name
from fedtailor.metrics.cost import probe
from fedtailor.metrics.truth import distances, fits, individual_excess_risk
from fedtailor.runs import config, models
from fedtailor.runs.history import Run
from fedtailor.runs.journal import Journal
from fedtailor.runs.patience import patience
from fedtailor.runs.record import columns_of
from fedtailor.runs.store import Store
from fedtailor.server.cohort import cohort_size
from fedtailor.task import Task
from fedtailor.theory.rates import resolve


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
    backbone: str | os.PathLike[str] | None = None,
    weights: str = "uniform",
    evaluate_every: int | None = None,
    new_clients: float = 0.0,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    device: str = "cpu",
    shift: Sequence[str] = (),
    callback: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Train ``algorithm`` on ``federation`` and measure it.

    ``backbone`` is a file of weights that a network given by name starts from. ``batch_size=None`` is the full batch. ``cohort``
    is the share of clients that take part in a round, or their number. ``weights`` are uniform or by training size.
    ``evaluate_every`` counts rounds (0: only at the end; None: about twenty times).
    ``new_clients`` holds out that share of the clients: never trained on, they meet the final model, do one round of local
    work, and are reported apart. ``shift`` names corruptions of the test images (``contrast:3``) to measure on as well, in the
    summary's ``shifted``. ``callback`` is given every round's record. The result does not depend on ``workers``, and
    on ``engine`` only in the last digits.

    ``out`` is the run directory. With ``resume`` a run that was stopped there goes on, and ends bit for bit as if it had never
    stopped; a finished one is read back. ``checkpoint_every`` counts rounds (None: as often as costs a twentieth of the time).
    """
    check(algorithm, federation, rounds, batch_size, seed, engine, workers, dtype, weights, evaluate_every, new_clients, device)
    if checkpoint_every is not None and (not isinstance(checkpoint_every, int) or checkpoint_every < 1):
        raise InvalidArgument(f"checkpoint_every must be a whole number of at least 1, not {checkpoint_every!r}")
    if resume and out is None:
        raise InvalidArgument("resume=True needs out=, the directory of the run")
    asked = {
        "rounds": rounds,
        "batch_size": batch_size,
        "cohort": cohort,
        "seed": seed,
        "engine": engine,
        "workers": workers,
        "dtype": dtype,
        "task": task,
        "bias": bias,
        "backbone": None if backbone is None else str(backbone),
        "weights": weights,
        "evaluate_every": evaluate_every,
        "new_clients": new_clients,
        "device": device,
        "checkpoint_every": checkpoint_every,
        "shift": list(shift) or None,
    }
    began = time.perf_counter()
    given = algorithm
    check_shift(shift, federation)
    federation = federation.to(DTYPES[dtype]).as_task(task or federation.kind)
    what = build_task(model, federation, seed, DTYPES[dtype], bias, backbone)
    alone = not algorithm.reads_rows
    trained, rows, told = after_prefix(what, federation) if alone else (what, federation, ())  # what a client trains, on what
    newcomers = newcomers_of(federation, new_clients, seed)
    learners = rows if newcomers is None else rows.take(np.setdiff1d(np.arange(len(rows)), newcomers))
    size = cohort_size(cohort, len(learners))
    algorithm, found = resolve(algorithm, trained, learners, rounds, size, batch_size, weights)
    algorithm = privatized(algorithm, trained, learners, rounds, size, batch_size, seed)
    if algorithm.needs_everyone and size < len(learners):
        raise InvalidArgument(f"{type(algorithm).__name__} needs all clients in every round; use cohort=1.0")
    plan = make_plan(algorithm, trained, learners, batch_size, seed, weights)
    facts = probe(algorithm, trained, plan.feed)
    every = max(1, rounds // 20) if evaluate_every is None else evaluate_every
    privacy = spent(plan, visits_of(plan, rounds, size)) if plan.uses is not None else {"epsilon": None}
    if plan.uses is not None and plan.uses.end:
        if evaluate_every:
            raise InvalidArgument(
                f"{type(algorithm).__name__} trains on a client's rows whenever it is evaluated; under privacy that is once, "
                "at the end: use evaluate_every=0"
            )
        every = 0
    state = State(*algorithm.init_server(trained), Store(len(learners)))

    with ExitStack() as held:
        journal = None
        if out is not None:
            same = {"model": _name(model), **asked, "backbone": config.content(backbone)}
            identity = config.identity(given, federation, state.shared, same, what.held)
            journal = Journal(Path(out), config.describe(given, federation, model, asked), identity, resume, checkpoint_every)
            held.callback(journal.close)
        earlier = None if journal is None else journal.found
        if earlier is not None:
            state.restore(earlier.checkpoint.state, earlier.records)
        before = None if earlier is None else earlier.checkpoint.facts
        chosen, why = choose_engine(engine, plan, state.shared, workers, size, seed, before)
        held.enter_context(chosen)
        stop = held.enter_context(patience(journal is not None))
        past = sum(r["seconds"] for r in state.records)
        kept = {"engine": chosen.name, "engine_reason": why}
        if journal is not None and earlier is None:
            journal.checkpoint(0, state.dump(), kept)
        last: dict[str, Any] = {}
        clients: Columns = {}
        started = time.perf_counter()
        for rnd in play_on(chosen, state, rounds, size, seed):
            talking = 0 if algorithm.silent(rnd) else rnd.cohort
            record: dict[str, Any] = {
                "round": rnd.number,
                "cohort": rnd.cohort,
                "bytes_down": facts["bytes_down"] * talking,
                "bytes_up": facts["bytes_up"] * talking,
                "seconds": time.perf_counter() - started,
                **algorithm.measures(state.server, rnd),
            }
            done = rnd.number + 1
            judged = None
            if done == rounds or (every and done % every == 0):
                measured, judged = evaluate(chosen, state.shared, state.store)
                record |= measured
                if done == rounds:
                    last = _against_truth(chosen, state.shared, state.store, judged)
                    clients = judged
            state.records.append(record)
            if journal is not None:
                journal.record(record, learners.names, judged, done == rounds)
            if callback is not None:
                callback(record)
            if journal is not None and (done == rounds or stop.asked is not None or journal.due(done)):
                journal.checkpoint(done, state.dump(), {**kept, "finished": done == rounds})
                if stop.asked is not None and done < rounds:
                    stop.stop()
            started = time.perf_counter()
        records = state.records
        if not clients:  # all rounds were played before
            assert journal is not None
            clients = columns_of(journal.folder, rounds - 1, learners.names)
            last = _against_truth(chosen, state.shared, state.store, clients)
        measured = {k: v for k, v in records[-1].items() if k not in ("round", "cohort", "bytes_down", "bytes_up", "seconds")}
        outside = None
        newly: dict[str, Any] = {}
        if newcomers is not None:
            others = make_plan(algorithm, trained, rows.take(newcomers), batch_size, seed, weights)
            newly, outside = meet_newcomers(others, state.shared, rounds)
            if others.uses is not None:
                newly["new_epsilon"] = spent(others, np.ones(len(newcomers), np.int64))["epsilon"]
        summary = (earlier and earlier.summary) or {
            "algorithm": type(algorithm).__name__,
            "settings": written(algorithm),
            "dataset": federation.name,
            "kind": what.kind,
            "model": _name(model),
            "clients": len(learners),
            "rounds": rounds,
            "seed": seed,
            "engine": chosen.name,
            "engine_reason": why,
            "workers": chosen.processes if isinstance(chosen, LoopEngine) else 1,
            **measured,
            **on_union(chosen, state.shared, state.store, seed),
            **routing(chosen, state.shared, state.store, seed),
            **on_public(chosen, state.shared, state.store, seed),
            "trained_parameters": facts["trained_parameters"],
            "personal_parameters": tree.size(chosen.personal(state.shared, 0, state.store)),
            "bytes_down": sum(r["bytes_down"] for r in records),
            "bytes_up": sum(r["bytes_up"] for r in records),
            **privacy,
            **_best(records, score_name(what.kind)),
            **({} if found is None else {"mu": found.mu, "smoothness": found.smoothness}),
            **last,
            **newly,
            "notes": [*federation.notes, *what.notes, *told, *plan.feed.notes()],
            "seconds": past + time.perf_counter() - began,
        }
        finished = Run(
            algorithm, what, federation, state.shared, state.server, state.store, chosen, outside, records, clients, summary
        )
        if shift and "shifted" not in summary:
            summary |= shifted_tests(finished, shift)
        if journal is not None and (earlier is None or earlier.summary is None):
            models.save(finished, model, bias, seed, dtype, journal.folder)
            journal.finish(summary)
    return finished


@dataclass
class State:
    """What a run carries from round to round."""

    shared: Any
    server: Any
    store: Store
    records: list[dict[str, Any]] = field(default_factory=list)

    def dump(self) -> Any:
        return {"shared": self.shared, "server": self.server, "store": self.store.dump()}

    def restore(self, dumped: Any, records: list[dict[str, Any]]) -> None:
        self.shared, self.server, self.records = dumped["shared"], dumped["server"], list(records)
        self.store.fill(dumped["store"])


def play_on(engine: Engine, state: State, rounds: int, size: int, seed: int) -> Iterator[Round]:
    """The rounds that are left, one by one; ``state`` is that after the round."""
    plan = engine.plan
    for number in range(len(state.records), rounds):
        ids = cohort_of(plan.federation, plan.algorithm, size, seed, number)
        rnd = round_of(number, rounds, plan, ids)
        upload = engine.round(state.shared, ids, rnd, state.store)
        state.shared, state.server = plan.algorithm.server_update(plan.task, state.shared, state.server, upload, rnd)
        _check_server(state.shared, rnd)
        yield rnd


def play(
    engine: Engine, shared: Any, server: Any, store: Store, rounds: int, size: int, seed: int
) -> Iterator[tuple[Round, tuple[Any, Any]]]:
    """The rounds, one by one: (round, (shared, server) after it). Personal state goes to ``store``."""
    state = State(shared, server, store)
    for rnd in play_on(engine, state, rounds, size, seed):
        yield rnd, (state.shared, state.server)


def choose_engine(
    name: str, plan: Plan, shared: Any, workers: int | None, size: int, seed: int, earlier: Mapping[str, Any] | None
) -> tuple[Engine, str]:
    """The engine asked for; a resumed run keeps the one it began with."""
    why = "asked for"
    if earlier is not None:
        name, why = earlier["engine"], earlier["engine_reason"]
    if name == "vectorized":
        return VectorizedEngine(plan), why
    if name == "loop":
        return LoopEngine(plan, workers), why
    return choose(plan, shared, cohort_of(plan.federation, plan.algorithm, size, seed, 0), workers)


def _name(model: str | nn.Module | Task) -> str:
    return model if isinstance(model, str) else type(model).__name__


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
