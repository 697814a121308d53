"""From a trained state to the summary of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from fedtailor import tree
from fedtailor.algorithms.settings import notes_on, spec, written
from fedtailor.engine.base import Engine
from fedtailor.engine.loop import LoopEngine
from fedtailor.engine.measure import (
    Columns,
    at_threshold,
    diagnosed,
    meet_newcomers,
    on_all_rows,
    on_public,
    on_union,
    personal_trees,
)
from fedtailor.engine.prepare import Prepared
from fedtailor.engine.private import spent
from fedtailor.engine.state import State
from fedtailor.metrics.truth import distances, fits, individual_excess_risk
from fedtailor.runs.store import Store
from fedtailor.runs.summary import Summary
from fedtailor.task.scores import Metric

OF_THE_ROUND = ("round", "cohort", "bytes_down", "bytes_up", "seconds", "stopped", "lost")  # of a record: not measures


def asked_for(ready: Prepared) -> dict[str, Any]:
    """Return what the summary says of what was run."""
    return {
        "algorithm": type(ready.algorithm).__name__,
        "source": spec(ready.algorithm),
        "settings": written(ready.algorithm),
        "dataset": ready.federation.name,
        "kind": ready.task.kind,
        "score": ready.task.score.name,
        "model": ready.model_name,
        "rounds": ready.options.rounds,
        "seed": ready.options.seed,
    }


def summarise(ready: Prepared, engine: Engine, why: str, state: State, clients: Columns) -> Summary:
    """Return the summary after the last round, whose per-client measures are ``clients``; without newcomers and time."""
    notes = (*ready.plan.feed.notes(), *ready.facts["notes"], *notes_on(ready.algorithm))
    sent, store, records = state.sent, state.store, state.records
    seed = ready.options.seed
    constants = {} if ready.constants is None else {"mu": ready.constants.mu, "smoothness": ready.constants.smoothness}
    summary = {
        **asked_for(ready),
        **({"own_measures": [metric.name for metric in ready.task.metrics]} if ready.task.metrics else {}),
        "clients": len(ready.plan.federation),
        **({} if ready.sample is None else {"evaluated_clients": len(ready.sample)}),
        "engine": engine.name,
        "engine_reason": why,
        "device": str(ready.device),
        "workers": engine.processes if isinstance(engine, LoopEngine) else 1,
        **{key: value for key, value in records[state.reported].items() if key not in OF_THE_ROUND},
        **on_all_rows(engine, sent, store),
        **on_union(engine, sent, store, seed),
        **at_threshold(engine, sent, store, ready.options.threshold),
        **diagnosed(engine, sent, store, seed),
        **on_public(engine, sent, store, seed),
        "trained_parameters": ready.facts["trained_parameters"],
        "personal_parameters": tree.size(engine.personal(sent, 0, store)),
        "bytes_down": sum(record["bytes_down"] for record in records),
        "bytes_up": sum(record["bytes_up"] for record in records),
        **ready.privacy,
        **best(records, ready.task.score),
        **constants,
        **_against_truth(engine, state, clients),
        **_ended(ready, state),
        "notes": [*ready.federation.notes, *ready.notes, *notes, *_note_on_sample(ready), *_notes_on_end(ready, state)],
    }
    return cast(Summary, summary)


def _ended(ready: Prepared, state: State) -> dict[str, Any]:
    """Return how the run ended, where a callback had a say in it."""
    snapshot = {} if state.snapshot is None else {"kept_round": state.snapshot.round}
    stopped = {} if state.stopped is None else {"rounds": len(state.records), "stopped": state.stopped}
    return {**snapshot, **stopped}


def _note_on_sample(ready: Prepared) -> list[str]:
    if ready.sample is None or not ready.every:
        return []
    count, clients = len(ready.sample), len(ready.plan.federation)
    return [f"measures between the rounds are of a sample of {count:,} of {clients:,} clients; those at the end are of all"]


def _notes_on_end(ready: Prepared, state: State) -> list[str]:
    notes = []
    if state.stopped is not None:
        notes.append(f"ended after {len(state.records)} of {ready.options.rounds} rounds: {state.stopped}")
        if ready.privacy["epsilon_max"] is not None or ready.plan.crowd is not None:
            notes.append(
                f"epsilon is that of all {ready.options.rounds} rounds, an upper bound on what the rounds played have spent"
            )
    if state.snapshot is not None and state.snapshot.round < len(state.records) - 1:
        notes.append(f"models and measures are those of round {state.snapshot.round} (counted from 0), which was kept")
    return notes


def meet(ready: Prepared, state: State) -> tuple[dict[str, Any], tuple[Engine, Store] | None]:
    """Return (measures of the clients that were held out, the engine and store to predict for them)."""
    if ready.newcomers is None:
        return {}, None
    measured, outside = meet_newcomers(ready.newcomers, state.sent, ready.options.rounds)
    if ready.newcomers.uses is not None:
        once = spent(ready.newcomers, np.ones(len(ready.newcomers.federation), np.int64))
        measured |= {"new_epsilon_max": once["epsilon_max"], "new_epsilon": once["epsilon"]}
    return measured, outside


def add_excess_risk(engine: Engine, clients: Columns) -> None:
    """Add every client's excess risk, ``ier``, where the true parameters are known and are a model of the task's shape."""
    federation, task = engine.plan.on_host.federation, engine.plan.on_host.task
    same_loss = task.example_loss == task.kind.example_loss  # of another the true parameters are no minimiser
    if same_loss and federation.truth is not None and fits(task, federation.truth[0]):
        clients["ier"] = individual_excess_risk(task, federation, clients["loss_personal"])


def _against_truth(engine: Engine, state: State, clients: Columns) -> dict[str, Any]:
    """Return the mean excess risk and distances to the true parameters, where they are known."""
    truth = engine.plan.on_host.federation.truth
    if truth is None or "ier" not in clients:
        return {}
    aer = float(np.dot(engine.plan.weights, clients["ier"]))
    return {"aer": aer, **distances(truth, engine.out(state.sent.newcomer), personal_trees(engine, state.sent, state.store))}


def best(records: Sequence[dict[str, Any]], score: Metric) -> dict[str, Any]:
    """Return the evaluated round that is best on validation, and what it gave on test (never the best on test)."""
    name = score.name
    judged = [r for r in records if r.get(f"val_{name}_personal") is not None]
    if not judged:
        return {"best_round": None}
    best = max(judged, key=lambda r: score.merit(r[f"val_{name}_personal"]))
    return {
        "best_round": best["round"],
        f"best_val_{name}_personal": best[f"val_{name}_personal"],
        f"best_{name}_personal": best[f"{name}_personal"],
        f"best_{name}_global": best[f"{name}_global"],
    }
