"""Checkpoints that write only the clients that changed: the same state comes back, however the run was stopped."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import tree
from fedtailor.runs import checkpoint, files, increments
from fedtailor.runs.store import Store
from tests.make import federation

OPTIONS = {"rounds": 12, "batch_size": 4, "cohort": 4, "evaluate_every": 0, "workers": 1, "checkpoint_every": 1}


@pytest.fixture(autouse=True)
def parted(monkeypatch):
    """Let no state be small."""
    monkeypatch.setattr(increments, "SMALL", 1)


@pytest.fixture(scope="module")
def fed():
    return federation([4] * 40)


def equal(a, b):
    return tree.shapes(a) == tree.shapes(b) and all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


def saved(folder, number, store, before):
    return checkpoint.save(folder, checkpoint.Checkpoint(number, {"shared": {"n": torch.tensor(number)}}, {}), store, before)


def visit(store, ids, draw):
    store.put(
        np.array(ids),
        {"a": torch.tensor(draw.normal(size=(len(ids), 3))), "b": {}, "c": torch.tensor(draw.integers(9, size=len(ids)))},
    )


def test_every_checkpoint_that_is_kept_has_the_state_of_its_round(tmp_path):
    draw, store, parts, wrote = np.random.default_rng(0), Store(50), [], []
    whole = {}
    for number in range(30):
        visit(store, np.sort(draw.choice(50, 3, replace=False)), draw)
        parts = saved(tmp_path, number, store, parts)
        wrote.append(parts[-1]["rows"])
        whole[number] = store.dump()
        newest = checkpoint.newest(tmp_path)
        assert newest.number == number
        assert equal(newest.state["store"], whole[number])
        assert sum(part["rows"] for part in parts) <= 2 * store.born.sum()
        assert {path.name for path in tmp_path.glob("store-*")} >= {part["file"] for part in parts}
        if number:
            shutil.copytree(tmp_path, tmp_path.with_name("copy"))
            (tmp_path.with_name("copy") / f"round-{number:07d}.json").write_text("{}")
            with pytest.warns(UserWarning, match="damaged"):
                older = checkpoint.newest(tmp_path.with_name("copy"))
            assert older.number == number - 1
            assert equal(older.state["store"], whole[number - 1])
            shutil.rmtree(tmp_path.with_name("copy"))
    assert wrote.count(3) > 20  # most write no more than what changed
    named = {part["file"] for path in tmp_path.glob("round-*.json") for part in json.loads(path.read_text())["parts"]}
    assert {path.name for path in tmp_path.glob("store-*")} == named


def test_a_part_that_was_changed_makes_its_checkpoints_damaged(tmp_path):
    draw, store = np.random.default_rng(0), Store(9)
    visit(store, range(9), draw)
    parts = saved(tmp_path, 1, store, [])
    visit(store, [3], draw)
    parts = saved(tmp_path, 2, store, parts)
    assert [part["rows"] for part in parts] == [9, 1]
    path = tmp_path / parts[1]["file"]
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.warns(UserWarning, match="round-0000002 is damaged"):
        assert checkpoint.newest(tmp_path).number == 1
    with pytest.raises(ValueError, match="none of its own"):
        increments.read([{**parts[0], "file": "../secret.safetensors"}], lambda name: b"")


def test_where_nobody_changed_nothing_is_written(tmp_path):
    store = Store(9)
    visit(store, range(9), np.random.default_rng(0))
    parts = saved(tmp_path, 1, store, [])
    assert saved(tmp_path, 2, store, parts) == parts
    assert len(list(tmp_path.glob("store-*"))) == 1


class Killed(BaseException):
    """Stands for a kill: nothing is written after it."""


@pytest.mark.parametrize("after", [8, 14, 21, 25, 30, 34])
def test_a_run_cut_off_between_any_two_files_ends_as_if_it_had_not_been(fed, tmp_path, after, monkeypatch):
    write, count = files.write, iter(range(10**6))

    def writing(path, *arguments, **more):
        if next(count) >= after:
            raise Killed
        write(path, *arguments, **more)

    monkeypatch.setattr(files, "write", writing)
    with pytest.raises(Killed):
        ft.run(ft.Ditto(lam=0.3), fed, out=tmp_path / "b", **OPTIONS)
    monkeypatch.setattr(files, "write", write)
    whole = ft.run(ft.Ditto(lam=0.3), fed, out=tmp_path / "a", **OPTIONS)
    again = ft.run(ft.Ditto(lam=0.3), fed, out=tmp_path / "b", resume=True, **OPTIONS)
    assert equal(whole.store.dump(), again.store.dump())
    assert equal(whole.shared, again.shared)
    for name in (
        "history.jsonl",
        "models/personal.safetensors",
        "models/shared.safetensors",
        "checkpoints/round-0000012.safetensors",
    ):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_run_in_parts_ends_as_one_in_whole_checkpoints_and_goes_on_from_either(fed, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stopping(record):
        if record["round"] == 7:
            raise Stop

    for out, small in (("parts", 1), ("whole", 1 << 30)):
        monkeypatch.setattr(increments, "SMALL", small)
        with pytest.raises(Stop):
            ft.run(ft.Ditto(lam=0.3), fed, out=tmp_path / out, callback=stopping, **OPTIONS)
        newest = checkpoint.newest(tmp_path / out / "checkpoints")
        assert newest.number == 7
        assert ("parts" in newest.facts) == (out == "parts")
    monkeypatch.setattr(increments, "SMALL", 1)
    runs = [ft.run(ft.Ditto(lam=0.3), fed, out=tmp_path / out, resume=True, **OPTIONS) for out in ("parts", "whole")]
    assert equal(runs[0].store.dump(), runs[1].store.dump())
    assert (tmp_path / "parts/history.jsonl").read_bytes() == (tmp_path / "whole/history.jsonl").read_bytes()
