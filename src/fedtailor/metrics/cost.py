"""What a round costs: bytes as they are really serialised, parameters trained and kept."""

from __future__ import annotations

from typing import Any

import torch

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Round
from fedtailor.data.feed import Feed
from fedtailor.local.loop import trained_parameters
from fedtailor.task import Task


def wire_bytes(message: Any) -> int:
    """Length of a message on the wire; nothing is sent for an empty tree."""
    return len(tree.pack(message)) if tree.leaves(message) else 0


def probe(algorithm: Algorithm, task: Task, feed: Feed, client: int = 0) -> dict[str, int]:
    """Facts found by letting one client go through one round: bytes down and up, parameters trained and kept."""
    shared, _ = algorithm.init_server(task)
    data = feed.one(client, 0)
    with trained_parameters() as record:
        personal = algorithm.init_client(task, shared, data)
        upload, personal = algorithm.client_update(task, shared, personal, data, Round())
        personal = algorithm.personalize(task, shared, personal, feed.one(client, 0, "personalize"))
    with torch.no_grad():
        return {
            "bytes_down": wire_bytes(shared),
            "bytes_up": wire_bytes(upload),
            "trained_parameters": sum(record.values()),
            "personal_parameters": tree.size(personal),
        }
