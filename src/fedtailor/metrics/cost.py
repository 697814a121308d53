"""What a round costs: bytes as they are really serialised, parameters trained and kept."""

from __future__ import annotations

from typing import Any

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.data.batches import Work
from fedtailor.data.feed import Feed
from fedtailor.local.loop import trained_parameters
from fedtailor.task import Task


def wire_bytes(message: Any) -> int:
    """Length of a message on the wire; nothing is sent for an empty tree."""
    return len(tree.pack(message)) if tree.leaves(message) else 0


def probe(algorithm: Algorithm, task: Task, feed: Feed, client: int = 0) -> dict[str, int]:
    """Facts found by letting one client go through one round of one step: bytes down and up, parameters trained and kept.

    Trained are those of all descents of a round (a method that trains two models counts both), or of personalising.
    """
    feed = Feed(feed.federation, {name: Work(steps=1) for name in feed.phases}, feed.batch_size, feed.seed)
    shared, _ = algorithm.init_server(task)
    data = feed.one(client, 0)
    with trained_parameters() as in_round:
        personal = algorithm.init_client(task, shared, data)
        upload, personal = algorithm.client_update(task, shared, personal, data, Round())
    with trained_parameters() as at_end:
        personal = algorithm.personalize(task, shared, personal, feed.one(client, 0, "personalize"))
    return {
        "bytes_down": wire_bytes(shared),
        "bytes_up": wire_bytes(upload),
        "trained_parameters": max(sum(in_round.values()), sum(at_end.values())),
        "personal_parameters": tree.size(personal),
    }
