"""What a round costs: bytes as they are really serialised, parameters trained and kept; what a prediction costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Round, opened
from fedtailor.data.feed import Feed
from fedtailor.local.meter import Meter, metered
from fedtailor.task import Task

DETOUR = (
    "{} descends on task.risk with more around it, which is slower than task.risk itself; "
    "where what it adds is free of data, give it as a penalty (prox, linear)"
)
TRIED = 9  # rounds to try until one trains
FORMS = 1000  # forms of messages whose length is remembered
_lengths: dict[str, int] = {}


def wire_bytes(message: Any) -> int:
    """Return the length of a message on the wire; an empty tree is not sent.

    It depends on the shapes alone, so a message of a form that was met before is not packed again.
    """
    form = str(tree.map(lambda leaf: (tuple(leaf.shape), leaf.dtype), message))
    if form not in _lengths:
        if len(_lengths) >= FORMS:
            _lengths.clear()
        _lengths[form] = len(tree.pack(message)) if tree.leaves(message) else 0
    return _lengths[form]


@dataclass
class Traffic:
    """Bytes sent to clients and by clients, counted as they are."""

    down: int = 0
    up: int = 0


def multiply_adds(call: Callable[[], object]) -> int:
    """Count the multiply-adds of the matrix products and convolutions that a call makes (other arithmetic is not counted)."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() // 2  # torch counts a multiply-add as two


def work_of_prediction(algorithm: Algorithm, task: Task, shared: Any, personal: Any, x: Tensor) -> int:
    """Multiply-adds of a client's predictions on these rows; {} in place of ``personal`` is often the shared model alone."""
    return multiply_adds(lambda: algorithm.predict(task, *opened(shared, personal), x))


class _Plan(Protocol):
    @property
    def algorithm(self) -> Algorithm: ...

    @property
    def task(self) -> Task: ...

    @property
    def feed(self) -> Feed: ...

    def feed_of(self, rnd: Round) -> Feed: ...

    def round(self, number: int, rounds: int, ids: NDArray[np.int64], exchange: int = 0) -> Round: ...

    def sent(self, shared: Any, server: Any, rnd: Round) -> Any: ...


def probe(plan: _Plan, client: int = 0) -> dict[str, Any]:
    """Measure a method by letting one client go through rounds of one step: bytes down and up of a round's exchanges, as
    serialised; parameters trained, and ``notes`` on what makes it slower than it could be."""
    algorithm, visit, at_end = plan.algorithm, train_once(plan, client), Meter()
    with metered(at_end):
        data = plan.feed.like(_one_step_phases(plan)).one(client, 0, "personalize")
        algorithm.personalize(plan.task, visit.received, visit.personal, data)
    return {
        "bytes_down": visit.down,
        "bytes_up": visit.up,
        "trained_parameters": max(visit.meter.trained, at_end.trained),
        "notes": (DETOUR.format(type(algorithm).__name__),) if visit.meter.detours or at_end.detours else (),
    }


class Visit(NamedTuple):
    """A client's part of a round of one step: what it received last, its state, bytes of all exchanges, the work it did."""

    received: Any
    personal: Any
    down: int
    up: int
    meter: Meter


def train_once(plan: _Plan, client: int = 0) -> Visit:
    """Return a client's first visit: round 0 may be a roll call and some rounds only average, so rounds are tried until one
    trains."""
    algorithm, task, ids, phases = plan.algorithm, plan.task, np.array([client]), _one_step_phases(plan)
    shared, server = algorithm.init_server(task)
    received = plan.sent(shared, server, plan.round(0, TRIED, ids)).to(client)
    personal = algorithm.init_client(task, received, plan.feed.like(phases).one(client, 0))
    for number in range(1, TRIED):
        meter, down, up = Meter(), 0, 0
        for exchange in range(algorithm.exchanges):
            rnd = plan.round(number, TRIED, ids, exchange)
            received, data = plan.sent(shared, server, rnd).to(client), plan.feed_of(rnd).like(phases).one(client, number)
            with metered(meter):
                upload, personal = algorithm.client_update(task, received, personal, data, rnd)
            down, up = down + wire_bytes(received), up + wire_bytes(upload)
        if meter.trained:
            break
    return Visit(received, personal, down, up, meter)


def _one_step_phases(plan: _Plan) -> dict[str, Any]:
    """Return the plan's phases with one step each."""
    return {name: work.taking(1) for name, work in plan.feed.phases.items()}
