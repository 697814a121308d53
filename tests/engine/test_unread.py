"""Rows in shards that only their node reads: the bits of the same rows in memory, and what is refused without them."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.data.describe import describe
from fedtailor.data.unread import Unread
from fedtailor.engine import cluster
from fedtailor.engine.options import Options
from fedtailor.errors import InvalidArgument, InvalidData
from tests.engine.test_shards import OPTIONS, same, shards
from tests.sites.network import federation
from tests.sites.test_core import METHODS

__all__ = ["shards"]  # a fixture


@pytest.fixture
def opened(monkeypatch) -> Counter[str]:
    """How often each file of rows was read."""
    counts: Counter[str] = Counter()
    read = Path.read_bytes

    def counted(self: Path) -> bytes:
        if self.suffix == ".npz":
            counts[self.name] += 1
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", counted)
    return counts


@pytest.mark.parametrize(("method", "model", "public"), METHODS, ids=lambda value: type(value).__name__)
def test_shards_that_read_their_own_files_give_the_bits_of_rows_in_memory(shards, tmp_path, method, model, public):
    fed = federation(public=public)
    loop = ft.run(method, fed, model, engine="loop", workers=1, out=tmp_path / "a", **OPTIONS)
    shards(3)
    unread = ft.Federation.from_shards(ft.save_shards(fed, tmp_path / "rows"), read=False)
    mine = ft.run(method, unread, model, engine="ray", on_nodes="loop", out=tmp_path / "b", **OPTIONS)
    same(mine, loop)
    for name in ("shared.safetensors", "personal.safetensors"):
        assert (tmp_path / "a" / "models" / name).read_bytes() == (tmp_path / "b" / "models" / name).read_bytes()
    told = {"engine", "engine_reason", "seconds", "workers", "notes"}
    for key in loop.summary.keys() - told:
        assert mine.summary[key] == loop.summary[key], key


def test_a_shard_reads_the_files_of_its_clients_and_no_others(shards, tmp_path, opened):
    fed, made = federation().to(torch.float32), shards(2)
    where = ft.save_shards(fed, tmp_path / "rows")
    index = {client["name"]: Path(client["file"]).name for client in json.loads((where / "index.json").read_text())["clients"]}
    unread = ft.Federation.from_shards(where, read=False)
    assert not opened
    ft.run(ft.Ditto(lam=0.2), unread, engine="ray", rounds=2)
    assert opened == Counter(index.values())  # each once, though all were measured twice
    engine = cluster.here(made[0].plan, Options(), 2)
    for shard, members in zip(engine.crew.shards, engine.places.members, strict=True):
        opened.clear()
        assert shard.engine.plan.federation.shards is None
        assert opened == Counter(index[fed.names[i]] for i in members)
        for i, name in enumerate(shard.plan.federation.names):
            assert torch.equal(shard.engine.plan.federation.train.client(i)[0], fed.train.client(fed.index(name))[0])


def test_a_finished_run_is_read_back_without_any_rows(shards, tmp_path, opened):
    shards(2)
    unread = ft.Federation.from_shards(ft.save_shards(federation(), tmp_path / "rows"), read=False)
    first = ft.run(ft.FedAvg(), unread, engine="ray", rounds=2, out=tmp_path / "a")
    opened.clear()
    again = ft.run(ft.FedAvg(), unread, engine="ray", rounds=2, out=tmp_path / "a", resume=True)
    assert not opened
    assert again.summary == first.summary
    x = np.ones((3, *unread.train.x.shape[1:]), np.float32)
    assert torch.equal(first.predict(unread.names[0], x), again.predict(unread.names[0], x))
    assert not opened


def test_what_needs_rows_here_is_refused_in_words(tmp_path):
    where = ft.save_shards(federation(), tmp_path / "rows")
    unread = ft.Federation.from_shards(where, read=False)
    for needs in (
        lambda: ft.advise(unread),
        lambda: describe(unread),
        lambda: ft.run(ft.FedCLUP(steps="theory"), unread, engine="ray", rounds=1),
        lambda: ft.compare([ft.FedAvg(), ft.Local()], unread, rounds=1),
        lambda: ft.run(ft.FedAvg(), unread, rounds=1),
        lambda: ft.run(ft.FedAvg(), unread, engine="vectorized", rounds=1),
        lambda: ft.run(ft.FedAvg(), unread, engine="ray", rounds=1, new_clients=0.3),
        lambda: ft.run(ft.FedAvg(), unread, engine="ray", rounds=1, shift=("contrast:3",)),
        lambda: unread.train.x.numpy(),
        lambda: np.asarray(unread.train.x),
        lambda: unread.train.y == 1,
        lambda: torch.cat([torch.zeros(2, *unread.train.x.shape[1:]), unread.train.x]),
        lambda: float(unread.train.x.sum()),
        lambda: unread.train.y.tolist(),
    ):
        with pytest.raises(InvalidArgument, match=r"needs clients' rows here, and those of .*rows are"):
            needs()


def test_the_form_of_rows_that_are_not_here_is_known(tmp_path):
    fed = federation()
    unread = ft.Federation.from_shards(ft.save_shards(fed, tmp_path / "rows"), read=False)
    x = unread.train.x
    assert isinstance(x, Unread)
    assert (x.shape, x.dtype, len(x)) == (fed.train.x.shape, fed.train.x.dtype, len(fed.train.x))
    assert x[:0].clone().shape == fed.train.x[:0].shape
    assert type(x[:0]) is torch.Tensor
    assert x[np.arange(3)].shape == fed.train.x[np.arange(3)].shape
    assert x.to(torch.float64).dtype == torch.float64
    assert pickle.loads(pickle.dumps(x)).shape == x.shape
    assert repr(unread) == repr(fed)


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_file_that_was_changed_is_refused_by_name(shards, tmp_path, damage):
    fed = federation()
    where = ft.save_shards(fed, tmp_path / "rows")
    client = json.loads((where / "index.json").read_text())["clients"][1]
    path = where / client["file"]
    content = path.read_bytes()
    changed = {"changed": content[:-200] + bytes([content[-200] ^ 1]) + content[-199:], "cut": content[:-10]}
    path.unlink() if damage == "gone" else path.write_bytes(changed[damage])
    with pytest.raises(InvalidData, match=client["file"]):
        ft.Federation.from_shards(where)
    shards(2)
    with pytest.raises(InvalidData, match=client["name"]):
        ft.run(ft.FedAvg(), ft.Federation.from_shards(where, read=False), engine="ray", rounds=1)
