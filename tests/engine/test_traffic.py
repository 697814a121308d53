"""Bytes are counted as they are sent: in every round, by every client."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.local import descend
from fedtailor.metrics.cost import wire_bytes
from fedtailor.server.reduce import nothing
from tests.make import federation

DATA = federation((7, 5, 9, 6))


@dataclass(frozen=True, kw_only=True)
class Growing(ft.Algorithm):
    """Sends the bias alone in even rounds and the whole model in odd ones; the server adds a leaf from round 2 on."""

    def init_server(self, task):
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        new = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return ({"bias": new["bias"]} if rnd.number % 2 == 0 else new), personal

    def server_update(self, task, shared, server, upload, rnd):
        more = {"more": torch.zeros(50)} if rnd.number >= 1 else {}
        return {**shared, "model": {**shared["model"], **upload}, **more}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_every_round_counts_what_it_sends(engine):
    run = ft.run(Growing(), DATA, engine=engine, workers=1, rounds=4, cohort=0.5, evaluate_every=0)
    model = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    small, large = len(tree.pack({"model": model})), len(tree.pack({"model": model, "more": torch.zeros(50)}))
    assert [r["bytes_down"] for r in run.history] == [2 * small, 2 * small, 2 * large, 2 * large]
    up = [len(tree.pack({"bias": model["bias"]})), len(tree.pack(model))]
    assert [r["bytes_up"] for r in run.history] == [2 * up[0], 2 * up[1], 2 * up[0], 2 * up[1]]


@dataclass(frozen=True, kw_only=True)
class Uneven(Growing):
    """A client uploads as many numbers as it has rows; nothing of it is used."""

    reduce = nothing

    def client_update(self, task, shared, personal, data, rnd):
        return {"rows": torch.zeros(int(data["rows"]))}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return shared, server


def test_every_client_is_counted_by_its_own_upload():
    run = ft.run(Uneven(), DATA, engine="loop", workers=1, rounds=1)
    assert run.history[0]["bytes_up"] == sum(len(tree.pack({"rows": torch.zeros(n)})) for n in (7, 5, 9, 6))


def test_a_length_is_that_of_the_packed_message_whatever_its_form():
    for message in ({}, {"a": {}}, {"a": torch.ones(3)}, {"a": torch.ones(3).double()}, {"b": {"a": torch.ones(3, 1)}}):
        for _ in range(2):
            assert wire_bytes(message) == (len(tree.pack(message)) if tree.leaves(message) else 0)


@pytest.mark.parametrize("method", [ft.FedAvg(), ft.Ditto(), ft.Local(), ft.HypCluster(), ft.PFedHN(), ft.GIANT(), ft.Scaffold()])
def test_our_methods_send_the_same_on_both_engines(method):
    cohort = 1.0 if method.needs_everyone else 0.5
    runs = [ft.run(method, DATA, engine=e, workers=1, rounds=3, cohort=cohort, batch_size=4) for e in ("loop", "vectorized")]
    sent = [[(r["bytes_down"], r["bytes_up"]) for r in run.history] for run in runs]
    assert sent[0] == sent[1]
    assert (np.sum(sent[0]) > 0) == (type(method).__name__ != "Local")


# -- recounted by hand ---------------------------------------------------------------------------------------------------
SIZES = {"F32": 4, "I32": 4, "I8": 1}


def length(keys, tensors):
    """Bytes of a message from the description of safetensors: a length of 8 bytes, a header in JSON padded to a multiple of 8,
    the numbers. ``keys`` is the tree with numbers in the place of its tensors (dtype, shape)."""
    header, at = {"__metadata__": {"keys": json.dumps(keys)}}, 0
    for number in sorted(range(len(tensors)), key=lambda i: (-SIZES[tensors[i][0]], i)):
        dtype, shape = tensors[number]
        end = at + SIZES[dtype] * math.prod(shape)
        header[str(number)] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"))
    return 8 + -(-len(text) // 8) * 8 + at


MODEL = [("F32", (2, 3)), ("F32", (2,))]  # three features, two classes
PLACED = [("F32", (3,)), ("I32", (3,)), ("I32", (2,)), ("F32", (1,)), ("I32", (1,)), ("I32", (1,))]  # half of each tensor
COARSE = [("I8", (2, 3)), ("F32", ()), ("I8", (2,)), ("F32", ())]  # 8 bits each, and a scale
IN_THREE = {
    "encoded:values": 0,
    "encoded:places": 1,
    "encoded:shape": 2,
}
BY_HAND = {
    "FedAvg": (ft.FedAvg(), length({"delta": {"weight": 0, "bias": 1}}, MODEL)),
    "top half": (
        ft.Compressed(method=ft.FedAvg(), keep=0.5),
        length({"delta": {"weight": IN_THREE, "bias": {name: number + 3 for name, number in IN_THREE.items()}}}, PLACED),
    ),
    "8 bits": (
        ft.Compressed(method=ft.FedAvg(), bits=8),
        length(
            {
                "delta": {
                    "weight": {"encoded:values": 0, "encoded:scale": 1},
                    "bias": {"encoded:values": 2, "encoded:scale": 3},
                }
            },
            COARSE,
        ),
    ),
}
THERE = [["0"], ["1", "2"], ["3"], ["0", "1", "2", "3"], []]  # who is there, round by round; in the last nobody
LOST = ["2"]  # in the fourth; what does not arrive is not counted


def who(number, names, draw):
    return THERE[number], LOST if number == 3 else []


@pytest.mark.parametrize(
    "how", [{"engine": "loop", "workers": 1}, {"engine": "loop", "workers": 2}, {"engine": "vectorized"}], ids=str
)
@pytest.mark.parametrize("kind", BY_HAND)
def test_the_bytes_of_each_client_and_round_are_those_counted_by_hand(kind, how):
    method, up = BY_HAND[kind]
    down = length({"model": {"weight": 0, "bias": 1}}, MODEL)
    run = ft.run(method, DATA, cohort=who, rounds=5, evaluate_every=0, batch_size=4, **how)
    counts = [len(there) for there in THERE]
    assert [record["bytes_down"] for record in run.history] == [count * down for count in counts]
    arrived = [count - len(LOST) * (number == 3) for number, count in enumerate(counts)]
    assert [record["bytes_up"] for record in run.history] == [count * up for count in arrived]
    assert (run.summary["bytes_down"], run.summary["bytes_up"]) == (sum(counts) * down, sum(arrived) * up)
