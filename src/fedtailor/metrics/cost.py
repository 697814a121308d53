"""What a round costs: bytes as they are really serialised, parameters trained and kept; what a prediction costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.data.feed import Feed
from fedtailor.local.loop import Record, metered
from fedtailor.task import Task


def wire_bytes(message: Any) -> int:
    """Length of a message on the wire; nothing is sent for an empty tree."""
    return len(tree.pack(message)) if tree.leaves(message) else 0


def multiply_adds(call: Callable[[], object]) -> int:
    """Multiply-adds of the matrix products and convolutions that a call makes (other arithmetic is not counted)."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() // 2  # torch counts a multiply-add as two


def work_of_blocks(task: Task, model: dict[str, Tensor], x: Tensor) -> dict[str, int]:
    """Multiply-adds of each block of a model on these rows."""
    out = {}
    for block in task.blocks:
        out[block.name] = multiply_adds(lambda block=block, x=x: block(model, x))  # type: ignore[misc]
        with torch.no_grad():
            x = block(model, x)
    return out


def work_of_prediction(algorithm: Algorithm, task: Task, shared: Any, personal: Any, x: Tensor) -> int:
    """Multiply-adds of a client's predictions on these rows; {} in place of ``personal`` is often the shared model alone."""
    return multiply_adds(lambda: algorithm.predict(task, shared, personal, x))


def probe(algorithm: Algorithm, task: Task, feed: Feed, client: int = 0) -> dict[str, int]:
    """Facts found by letting one client go through rounds of one step: bytes down and up, parameters trained.

    Round 0 may be a roll call and some rounds may only average, so rounds are tried until one trains.
    """
    feed = feed.like({name: work.taking(1) for name, work in feed.phases.items()})
    shared, _ = algorithm.init_server(task)
    personal = algorithm.init_client(task, shared, feed.one(client, 0))
    in_round: Record = {}
    at_end: Record = {}
    for number in range(1, 9):
        with metered(in_round):
            upload, after = algorithm.client_update(task, shared, personal, feed.one(client, number), Round(number=number))
        if in_round:
            break
    with metered(at_end):
        algorithm.personalize(task, shared, after, feed.one(client, 0, "personalize"))
    return {
        "bytes_down": wire_bytes(shared),
        "bytes_up": wire_bytes(upload),
        "trained_parameters": max(trained(in_round), trained(at_end)),
    }


def trained(record: Record) -> int:
    """Parameters trained: those of all descents (a method that trains two models counts both); in a method that steps by itself,
    what its scans carry, or else what it takes gradients of."""
    by_kind = {kind: [n for (k, *_), n in record.items() if k == kind] for kind in ("descend", "scan", "gradient")}
    return sum(by_kind["descend"]) or sum(by_kind["scan"]) or max(by_kind["gradient"], default=0)
