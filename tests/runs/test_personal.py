"""Everybody's models are saved in a number of tensors and steps that does not grow with the clients, and come back the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fedtailor as ft
from fedtailor import tree
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.runs import models
from fedtailor.runs.personal import STACKS, PersonalTrees, stacked
from tests.make import federation

OPTIONS = {"rounds": 2, "batch_size": 4, "cohort": 0.5, "evaluate_every": 0}


def equal(a, b):
    return tree.shapes(a) == tree.shapes(b) and all(map(torch.allclose, tree.leaves(a), tree.leaves(b)))


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize(
    "method",
    [ft.FedAvg(), ft.Ditto(), ft.FedAvgFT(), ft.KNNPer(), ft.PFedHN(), ft.Local()],
    ids=lambda method: type(method).__name__,
)
def test_saved_trees_are_those_of_the_run(method, engine, tmp_path):
    clients = federation([5, 9, 6, 14, 7, 8])
    run = ft.run(method, clients, "mlp:4", engine=engine, workers=1, out=tmp_path / "run", new_clients=0.3, **OPTIONS)
    saved = models.read(tmp_path / "run")
    assert set(saved.personal) == set(clients.names)
    x = clients.test.x
    assert all(torch.allclose(saved.predict(name, x), run.predict(name, x), atol=1e-6) for name in clients.names)
    if not isinstance(method, ft.KNNPer):  # whose memories are padded to the longest that is computed beside them
        assert all(equal(saved.personal[name], run.personal[name]) for name in clients.names)


def tensors_in(path):
    with safe_open(path, "pt") as file:
        return len(file.keys())


def test_tensors_and_steps_do_not_grow_with_the_clients(tmp_path, monkeypatch):
    alone = VectorizedEngine.personal
    asked = []
    monkeypatch.setattr(VectorizedEngine, "personal", lambda *arguments: asked.append(1) or alone(*arguments))
    counts = []
    for size in (10, 200):
        asked.clear()
        ft.run(ft.Ditto(), federation([4] * size), engine="vectorized", out=tmp_path / str(size), **OPTIONS)
        counts.append((tensors_in(tmp_path / str(size) / "models" / "personal.safetensors"), len(asked)))
    assert counts[0] == counts[1]


def test_trees_of_different_shapes_and_empty_ones_come_back_by_name():
    draw = np.random.default_rng(0)
    trees = [{"a": {"b": torch.tensor(draw.normal(size=1 + i % 3))}, "c": {}} if i % 4 else {} for i in range(9)]
    order = draw.permutation(9)
    chunks = [(np.array([i]), tree.map(lambda leaf: leaf[None], trees[i])) for i in order]
    packed = tree.unpack(tree.pack(stacked(chunks, 1 << 20)))
    names = [f"client {i}" for i in range(9)]
    found = PersonalTrees(names, packed)
    assert set(found) == set(names)
    assert all(equal(found[name], trees[i]) for i, name in enumerate(names))
    assert len(packed[STACKS]) == 4


def test_what_is_too_large_is_left_out():
    assert stacked([(np.arange(2), {"a": torch.zeros(2, 9)})], 50) == {STACKS: {}}


def test_clients_are_found_by_name_without_a_search():
    clients = federation([4] * 5)
    assert [clients.index(name) for name in clients.names] == list(range(5))
    assert clients.positions == {name: i for i, name in enumerate(clients.names)}
