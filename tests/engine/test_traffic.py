"""Bytes are counted as they are sent: in every round, by every client."""

from __future__ import annotations

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
