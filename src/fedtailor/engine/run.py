"""``run``: prepare, play the rounds, summarise; and keep it all on disk if asked to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.data.federation import Federation
from fedtailor.engine.base import Engine, Ids, one_thread
from fedtailor.engine.checked import taking
from fedtailor.engine.divergence import check_loss
from fedtailor.engine.longer import check_longer, spaced
from fedtailor.engine.measure import Columns, evaluate, shifted_tests
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import Prepared, prepare
from fedtailor.engine.rounds import play_on
from fedtailor.engine.shards import alone
from fedtailor.engine.state import State
from fedtailor.engine.summary import add_excess_risk, meet, summarise
from fedtailor.errors import InvalidArgument
from fedtailor.metrics.cost import Traffic
from fedtailor.runs import config, models, noise_key
from fedtailor.runs.history import Run
from fedtailor.runs.journal import Journal
from fedtailor.runs.patience import StopRequest, patience
from fedtailor.runs.record import columns_of
from fedtailor.task import Task
from fedtailor.task.device import backend

Callback = Callable[[dict[str, Any]], None]


@taking(Options)
@one_thread()
def run(
    algorithm: Algorithm,
    federation: Federation,
    model: str | nn.Module | Task | Callable[..., nn.Module] = "linear",
    options: Options | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    **settings: Any,
) -> Run:
    """Train ``algorithm`` on ``federation`` and measure it; the settings below are keyword arguments (or ``options``).

    ``model`` is the name of a network, a module, a task, or a function that makes a module (given those of ``shape``, ``outputs``
    and ``seed`` that it names, with torch's generator started from the seed).
    ``out`` is the run directory. With ``resume`` a run that was stopped there goes on, and ends bit for bit as if it had never
    stopped; a finished one is read back, or goes on where more ``rounds`` are asked for. ``callback`` is given every round's
    record, to watch; what may end a run is given as ``callbacks`` (``engine/watch.py``). The result does not depend on
    ``workers``, and on ``engine`` only in the last digits.
    """
    began = time.perf_counter()
    if resume and out is None:
        raise InvalidArgument("resume=True needs out=, the directory of the run")
    asked = Options.of({**(options.plain() if options else {}), **settings})
    if out is not None and resume:
        asked = spaced(asked, Path(out))
    ready = prepare(algorithm, federation, model, asked, noise_key.read(Path(out)) if out is not None and resume else None)
    state = ready.start()
    with ExitStack() as stack:

        def lengthen(before: int) -> None:
            check_longer(ready, prepare(algorithm, federation, model, asked.but(rounds=before), ready.secret))

        journal = None
        if out is not None:
            journal = stack.enter_context(closing(_journal(ready, state.shared, Path(out), resume, lengthen)))
        earlier = None if journal is None else journal.earlier
        if journal is not None and ready.is_secret:
            noise_key.keep(journal.folder, ready.secret, begun=earlier is not None)
        places = _places(earlier, ready.device)
        if len(places) > 1:
            ready = replace(ready, notes=(*ready.notes, _moved_on(places)))
        if earlier is not None:
            state.restore(earlier.checkpoint.state, earlier.records)
            began -= earlier.seconds  # the time of earlier sittings counts
            if earlier.summary is not None:
                stack.enter_context(alone())  # there is nothing left to play: no cluster is needed
        engine, why = ready.engine(state, None if earlier is None else earlier.checkpoint.facts)
        stack.enter_context(engine)
        state.store = engine.hold(state.store)
        with patience(journal is not None) as stop:  # what comes after the last checkpoint may be stopped at any moment
            diary = Diary(journal, {"engine": engine.name, "engine_reason": why, "devices": places}, stop, callback, began)
            clients = _train(ready, engine, state, diary)
        finished = _finished(ready, engine, why, state, clients, None if earlier is None else earlier.summary)
        if earlier is None or earlier.summary is None:
            _write(finished, ready, journal, began)
    return finished


def _finished(ready: Prepared, engine: Engine, why: str, state: State, clients: Columns, written: Any) -> Run:
    """Return the run at its end, with the summary that was ``written`` in an earlier sitting, or a new one."""
    state.go_back()
    state.sent = ready.plan.sent_after(state.shared, state.server, state.reported + 1, ready.options.rounds)
    measured, newcomers = meet(ready, state)
    summary = {**summarise(ready, engine, why, state, clients), **measured} if written is None else written
    whole, trees = (ready.task, ready.federation), (engine.out(state.shared), engine.out(state.server), state.store)
    finished = Run(ready.algorithm, *whole, *trees, engine, newcomers, state.records, clients, summary)
    if ready.options.shift and "shifted" not in summary:
        summary |= shifted_tests(finished, ready.options.shift)
    return finished


def _write(finished: Run, ready: Prepared, journal: Journal | None, began: float) -> None:
    """Add to the summary how long the run took, and write it and the models down; the manifest comes last."""
    summary: Any = finished.summary
    if journal is None:
        summary["seconds"] = time.perf_counter() - began
        return
    models.save(finished, ready.model, ready.options.plain(), journal.folder)
    digests = journal.digests()
    summary["seconds"] = time.perf_counter() - began
    journal.finish(summary, digests)


def _places(earlier: Any, device: torch.device) -> list[str]:
    """Return the devices on which the run was computed so far, in order, with this one."""
    before = [] if earlier is None else list(earlier.checkpoint.facts.get("devices", ["cpu"]))
    return before if before and before[-1] == str(device) else [*before, str(device)]


def _moved_on(places: list[str]) -> str:
    return f"Begun on {places[0]} and continued on {', then '.join(places[1:])}: not the bits of a run on one device."


@dataclass(frozen=True)
class Diary:
    """Everyone who is told of a round: the run directory, with the facts that go with a checkpoint; and the caller."""

    journal: Journal | None
    facts: dict[str, Any]
    stop: StopRequest
    callback: Callback | None
    began: float  # on the clock of ``time.perf_counter``

    def tell(self, state: State, names: Any, judged: Columns | None, last: bool, ends: bool) -> None:
        """Write the last round down, with every client's measures where the run may end with it, and tell the caller; stop here
        if that was asked for."""
        record, done = state.records[-1], len(state.records)
        if self.journal is not None:
            self.journal.record(record, names, judged, ends)
        if self.callback is not None:
            self.callback(record)
        if self.journal is not None and (last or self.stop.asked is not None or self.journal.due(done)):
            facts = {**self.facts, "finished": last, "seconds": time.perf_counter() - self.began}
            self.journal.checkpoint(done, state.trees(), facts, state.store)
            self.stop.stop()


def _train(ready: Prepared, engine: Engine, state: State, diary: Diary) -> Columns:
    """Play the rounds that are left; the clients' measures after the last one, or after the one that is kept."""
    rounds, names, watch = ready.options.rounds, ready.plan.federation.names, ready.watch()
    watch.recall(state.records)
    if diary.journal is not None and diary.journal.earlier is None:
        diary.journal.checkpoint(0, state.trees(), diary.facts, state.store)
    elif diary.journal is not None and diary.journal.earlier is not None and diary.journal.earlier.lengthened:
        _judge_anew(ready, engine, state, diary)
    columns: dict[int, Columns] = {}  # of the round that the run would end with
    began = time.perf_counter()
    for rnd in play_on(engine, state, rounds, ready.size) if state.stopped is None else ():
        backend(ready.device).wait(ready.device)  # what was asked for is computed: the clock shows its time
        record = {**_facts(ready, engine, state, rnd), "seconds": time.perf_counter() - began}
        state.records.append(record)
        done = rnd.number + 1
        sample = None if done == rounds else ready.sample
        judged = _judge(engine, state, rnd, done == rounds or bool(watch), sample) if ready.is_judged(done) else None
        reason = watch.tell(engine, state)
        last = done == rounds or reason is not None
        ends = last or state.reported == rnd.number  # with this round, for all that is known
        if ends and watch and judged is None:
            judged = _judge(engine, state, rnd, True)
        if reason is not None and done < rounds:
            record["stopped"] = reason
        if ends and judged is not None and sample is None:
            add_excess_risk(engine, judged)
            columns = {rnd.number: judged} if state.reported == rnd.number else columns
        shown = names if sample is None else [names[i] for i in sample]
        diary.tell(state, shown, judged, last, last or (ends and bool(watch)))
        began = time.perf_counter()
        if last:
            break
    if state.reported not in columns:  # it was played in an earlier sitting
        assert diary.journal is not None
        return columns_of(diary.journal.contents, state.reported, names)
    return columns[state.reported]


def _judge_anew(ready: Prepared, engine: Engine, state: State, diary: Diary) -> None:
    """Write the last record as it would have been, had it not been that of the last round."""
    assert diary.journal is not None
    number, rounds, names = len(state.records) - 1, ready.options.rounds, ready.plan.federation.names
    state.sent = ready.plan.sent_after(state.shared, state.server, number + 1, rounds)
    measured, judged = evaluate(engine, state.sent, state.store)
    record = state.records[-1] = {key: value for key, value in state.records[-1].items() if key not in measured}
    is_kept = state.snapshot is not None and state.snapshot.round == number
    if is_kept or ready.is_judged(number + 1):
        more, judged = evaluate(engine, state.sent, state.store, bool(ready.watch()), ready.sample)
        record |= {**more, **_of_sample(ready.sample)}
    else:
        judged = {}
    if is_kept:
        add_excess_risk(engine, judged)
    shown = names if ready.sample is None else [names[i] for i in ready.sample]
    diary.journal.record(record, shown, judged or None, is_kept)
    facts = {**diary.facts, "seconds": time.perf_counter() - diary.began}
    diary.journal.checkpoint(number + 1, state.trees(), facts, state.store)


def _facts(ready: Prepared, engine: Engine, state: State, rnd: Round) -> dict[str, Any]:
    """Return what a record says of a round before anything is measured."""
    traffic = _traffic(ready, engine, rnd)
    facts = {"round": rnd.number, "cohort": rnd.cohort, "bytes_down": traffic.down, "bytes_up": traffic.up}
    if len(rnd.lost):
        facts["lost"] = len(rnd.lost)
    return {**facts, **ready.algorithm.measures(state.server, rnd)}


def _judge(engine: Engine, state: State, rnd: Round, final: bool, sample: Ids | None = None) -> Columns:
    """Measure the state after a round, on all clients or a sample: their columns, of which the last record says the means."""
    measured, judged = evaluate(engine, state.sent, state.store, final, sample)
    check_loss(engine, state.sent, state.store, judged["loss_personal"], rnd)
    state.records[-1].update({**measured, **_of_sample(sample)})
    return judged


def _of_sample(sample: Ids | None) -> dict[str, int]:
    """Return what a record says of a sample whose means it holds."""
    return {} if sample is None else {"evaluated_clients": len(sample)}


def _traffic(ready: Prepared, engine: Engine, rnd: Round) -> Traffic:
    """Return what was sent in the round that has just ended. Where it is not told who took part, it is that of the expected
    number."""
    if ready.algorithm.silent(rnd):
        return Traffic()
    if ready.plan.crowd is not None:
        return Traffic(ready.facts["bytes_down"] * rnd.cohort, ready.facts["bytes_up"] * rnd.cohort)
    return engine.traffic


def _journal(ready: Prepared, shared: Any, out: Path, resume: bool, lengthen: Callable[[int], None]) -> Journal:
    """Return the run directory, begun or opened again."""
    asked = ready.options.plain()
    same = {"model": ready.model_name, **ready.options.identity(), "backbone": config.content(asked["backbone"])}
    if isinstance(asked["cohort"], str):
        same["cohort"] = config.content(asked["cohort"])  # a table that was moved is the same
    identity = config.identity(ready.asked, ready.federation, shared, same, ready.task.frozen)
    described = config.describe(ready.asked, ready.federation, ready.model, asked)
    return Journal(out, described, identity, resume, asked["checkpoint_every"], lengthen)
