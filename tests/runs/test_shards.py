"""Models and measures of very many clients: in files that are mapped, found by name, and the same as in small ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.data import rng
from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.runs import journal, models, shards
from fedtailor.runs.contents import open_contents, verify_all
from fedtailor.runs.names import Names, packed_names
from fedtailor.runs.record import read
from tests.make import federation

OPTIONS = {"rounds": 3, "batch_size": 4, "cohort": 0.5, "evaluate_every": 1, "workers": 1}


def equal(a, b):
    return tree.shapes(a) == tree.shapes(b) and all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


@pytest.fixture
def many(monkeypatch):
    """Let four clients be very many, and files be small."""
    for module in (journal, models):
        monkeypatch.setattr(module, "MANY", 4)
    monkeypatch.setattr(shards, "SHARD", 300)
    monkeypatch.setattr(shards, "BLOCK", 128)


def test_names_are_found_whatever_they_are_called(monkeypatch):
    names = ["", "a", "ä b", "\n", "client 1", "client 11", "a\x00"]
    found = Names(tree.unpack(tree.pack(packed_names(names))))
    assert list(found) == names == [found[i] for i in range(len(names))]
    assert [found.find(name) for name in names] == list(range(len(names)))
    assert "client" not in found
    assert found.find("b") is None
    monkeypatch.setattr(rng, "purpose", lambda name: 7)  # all words alike
    found = Names(packed_names(names))
    assert [found.find(name) for name in names] == list(range(len(names)))
    assert found.find("b") is None
    assert list(Names(packed_names([]))) == []


def test_trees_of_different_shapes_and_empty_ones_come_back_by_name(tmp_path, many):
    draw = np.random.default_rng(0)
    kinds = (torch.float32, torch.float64, torch.int64, torch.bool)
    trees = [
        {"a": {"b": torch.tensor(draw.normal(size=1 + i % 3)).to(kinds[i % 4])}, "c": {}, "d": torch.tensor(1.5 + i)}
        if i % 5
        else {}
        for i in range(40)
    ]
    chunks = [(np.array([i]), tree.map(lambda leaf: leaf[None], trees[i])) for i in draw.permutation(39)]
    names = [f"client {i}" for i in range(40)]
    facts = json.loads(json.dumps(shards.write(tmp_path, names, chunks, 1 << 20)))
    found = shards.Shards(tmp_path, tree.unpack((tmp_path / shards.INDEX).read_bytes()), facts)
    assert list(found) == names[:39]
    assert len(found) == 39
    assert all(equal(found[name], trees[i]) for i, name in enumerate(names[:39]))
    assert found.numbers == sum(tree.size(one) for one in trees[:39])
    assert names[39] not in found
    with pytest.raises(KeyError):
        found[names[39]]


def test_what_is_too_large_is_left_out(tmp_path, many):
    facts = shards.write(tmp_path, ["a", "b"], [(np.array([i]), {"a": torch.zeros(1, 99)}) for i in range(2)], 500)
    assert facts["stacks"] == []
    assert [path.name for path in tmp_path.iterdir()] == [shards.INDEX]


@pytest.mark.parametrize("method", [ft.FedAvg(), ft.Ditto(), ft.PFedHN()], ids=lambda method: type(method).__name__)
def test_a_large_run_is_read_back_as_a_small_one_is(method, tmp_path, many, monkeypatch):
    fed = federation([5, 9, 6, 14, 7, 8], names=[f"clinic {i}" for i in range(6)])
    run = ft.run(method, fed, out=tmp_path / "large", **OPTIONS)
    lines = [json.loads(line) for line in (tmp_path / "large" / "history.jsonl").read_text().splitlines()]
    assert [line["client"] for line in lines if "client" in line] == [None]
    again = ft.run(method, fed, out=tmp_path / "large", resume=True, **OPTIONS)
    verify_all(open_contents(tmp_path / "large"))
    large, measured = models.read(tmp_path / "large"), read(open_contents(tmp_path / "large"))
    for module in (journal, models):
        monkeypatch.setattr(module, "MANY", 100)
    ft.run(method, fed, out=tmp_path / "small", **OPTIONS)
    small, expected = models.read(tmp_path / "small"), read(open_contents(tmp_path / "small"))
    assert large.clients == small.clients == list(fed.names)
    assert all(equal(large.personal[name], small.personal[name]) for name in fed.names)
    x = fed.test.x
    assert torch.equal(large.predict("clinic 3", x), small.predict("clinic 3", x))
    with pytest.raises(InvalidArgument, match="no client 'clinic 9'; the clients are clinic 0"):
        large.of("clinic 9")
    assert list(measured.names) == list(expected.names)
    for key, values in expected.clients.items():
        assert np.array_equal(measured.clients[key], values, equal_nan=True), key
        assert np.array_equal(run.clients[key], values, equal_nan=True), key
        assert np.array_equal(again.clients[key], values, equal_nan=True), key
    assert [{**r, "seconds": 0} for r in measured.rounds] == [{**r, "seconds": 0} for r in expected.rounds]


@pytest.mark.parametrize("place", ["models/personal-0-00000.safetensors", "models/index.safetensors", "measures"])
def test_a_byte_that_was_changed_is_named(place, tmp_path, many):
    fed = federation([5, 9, 6, 14, 7, 8])
    ft.run(ft.Ditto(), fed, out=tmp_path / "run", **OPTIONS)
    path = tmp_path / "run" / place
    path = next(path.iterdir()) if path.is_dir() else path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    def use():
        saved = models.read(tmp_path / "run")
        for name in saved.clients:
            saved.of(name)
        read(open_contents(tmp_path / "run"))

    with pytest.raises(BadRun, match=path.name):
        use()
    with pytest.raises(BadRun, match=path.name):
        verify_all(open_contents(tmp_path / "run"))


def test_only_the_block_of_the_client_is_checked_and_once(tmp_path, many, monkeypatch):
    chunk = np.arange(30), {"a": torch.arange(30 * 16, dtype=torch.float32).view(30, 16)}
    names = [str(i) for i in range(30)]
    monkeypatch.setattr(shards, "SHARD", 1 << 20)
    facts = shards.write(tmp_path, names, [chunk], 1 << 20)
    found = shards.Shards(tmp_path, tree.unpack((tmp_path / shards.INDEX).read_bytes()), facts)
    path = tmp_path / "personal-0-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the last record
    path.write_bytes(data)
    assert torch.equal(found["0"]["a"], chunk[1]["a"][0])
    assert len(found._checked) <= 3
    with pytest.raises(BadRun):
        found["29"]
    path.write_bytes(bytes(data[:200]))
    with pytest.raises(BadRun):
        shards.Shards(tmp_path, found.index, facts)["20"]
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(BadRun):
        shards.Shards(tmp_path, found.index, facts)["0"]
