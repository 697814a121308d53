"""A federation as a folder of files, one for every client: what comes back is what was written."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch

import fedtailor as ft
from fedtailor.errors import InvalidArgument, InvalidData

PARTS = ("train", "test", "val")


def pairs(sizes: tuple[int, ...] = (5, 3, 4), seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(seed)
    return [(draw.normal(size=(n, 2)), np.arange(n) % 3) for n in sizes]


def equal(one: ft.Federation, other: ft.Federation) -> None:
    for part in PARTS:
        mine, theirs = getattr(one, part), getattr(other, part)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.x.dtype == theirs.x.dtype
            assert torch.equal(mine.x, theirs.x)
            assert torch.equal(mine.y, theirs.y)
            np.testing.assert_array_equal(mine.offsets, theirs.offsets)
    for field in ("names", "kind", "labels", "name", "classes", "tokens", "packing", "schema"):
        assert getattr(one, field) == getattr(other, field), field


def federations() -> dict[str, ft.Federation]:
    draw = np.random.default_rng(1)
    text = [(draw.integers(5, size=(n, 4)), draw.integers(2, size=n)) for n in (3, 2)]
    parts = [({"image": draw.normal(size=(n, 1, 2, 2)), "age": draw.normal(size=(n, 1))}, np.arange(n) % 2) for n in (3, 4)]
    numbers = [(draw.normal(size=(n, 2)), draw.normal(size=n)) for n in (3, 4)]
    table = pd.DataFrame({"site": ["a"] * 8 + ["b"] * 8, "dose": range(16), "sex": list("mf") * 8, "ill": [0, 1, 1, 0] * 4})
    arrays = ft.Federation.from_arrays
    return {
        "classes": arrays(pairs(), pairs(), pairs(), classes=["x", "y", "z"], names=["é/1", "..", "c\nd"]),
        "tokens": arrays(text, text, tokens=5),
        "parts": arrays(parts, parts),
        "numbers": arrays(numbers, numbers).to(torch.float64),
        "table": ft.Federation.from_table(table, client="site", label="ill"),
    }


@pytest.mark.parametrize("name", ["classes", "tokens", "parts", "numbers", "table"])
def test_what_is_read_is_what_was_saved(tmp_path, name):
    fed = federations()[name]
    where = ft.save_shards(fed, tmp_path / "rows")
    equal(ft.Federation.load(f"shards:{where}"), fed)
    equal(ft.Federation.load(str(where)), fed)  # it shows what it is


def test_weights_facts_and_public_rows_come_back(tmp_path):
    weights, public = [np.arange(1.0, n + 1) for n in (5, 3, 4)], np.random.default_rng(2).normal(size=(6, 2))
    fed = ft.Federation.from_arrays(pairs(), pairs(), public=public, weights=weights).with_facts(lam=[0.1, 0.2, 0.3])
    back = ft.Federation.from_shards(ft.save_shards(fed, tmp_path / "rows"))
    assert torch.equal(back.train.weights, fed.train.weights)
    assert torch.equal(back.public, fed.public)
    np.testing.assert_array_equal(back.facts["lam"], [0.1, 0.2, 0.3])
    (tmp_path / "rows" / "public.npz").write_bytes(b"PK")
    with pytest.raises(InvalidData, match=r"public\.npz was changed"):
        ft.Federation.from_shards(tmp_path / "rows", read=False)


def test_parts_of_a_federation_that_fits_in_no_memory_are_added(tmp_path):
    whole = ft.Federation.from_arrays(pairs(), pairs(), names=["a", "b", "c"])
    for i in range(3):
        ft.save_shards(whole.take([i]), tmp_path / "rows", add=True)
    equal(ft.Federation.from_shards(tmp_path / "rows"), whole)
    with pytest.raises(InvalidArgument, match="a client 'b' in"):
        ft.save_shards(whole.take([1]), tmp_path / "rows", add=True)
    wide = [(np.ones((3, 7)), np.arange(3))]
    with pytest.raises(InvalidArgument, match="have another forms"):
        ft.save_shards(ft.Federation.from_arrays(wide, wide, names=["d"]), tmp_path / "rows", add=True)
    with pytest.raises(InvalidArgument, match="is not empty"):
        ft.save_shards(whole, tmp_path / "rows")


def test_counts_of_classes_are_of_the_clients_that_are_taken(tmp_path):
    fed = ft.Federation.from_arrays(pairs(), pairs())
    unread = ft.Federation.from_shards(ft.save_shards(fed, tmp_path / "rows"), read=False)
    np.testing.assert_array_equal(unread.shards.counts, [[2, 2, 1], [1, 1, 1], [2, 1, 1]])
    np.testing.assert_array_equal(unread.take([2, 0]).shards.counts, [[2, 1, 1], [2, 2, 1]])
    equal(unread.take([2, 0]).with_rows(), fed.take([2, 0]))
    equal(unread.to(torch.float64).with_rows(), fed.to(torch.float64))


def test_the_same_rows_have_the_same_digests_whenever_they_are_saved(tmp_path, monkeypatch):
    fed = ft.Federation.from_arrays(pairs(), pairs())
    first = ft.save_shards(fed, tmp_path / "a")
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert (ft.save_shards(fed, tmp_path / "b") / "index.json").read_bytes() == (first / "index.json").read_bytes()


def changed_index(where, change):
    index = json.loads((where / "index.json").read_text())
    change(index)
    (where / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index["clients"][0].update(file="../elsewhere.npz"), "not in the folder"),
        (lambda index: index["clients"][0].update(file="/etc/passwd"), "not in the folder"),
        (lambda index: index["clients"][0]["rows"].update(train=7), "has shape"),
        (lambda index: index["clients"][1].update(name=index["clients"][0]["name"]), "two clients of one name"),
        (lambda index: index.pop("kind"), "no index of shards"),
        (lambda index: index.update(format="other"), "no index of shards"),
        (lambda index: index["forms"]["x"].update(dtype="object"), "no index of shards"),
    ],
)
def test_an_index_that_cannot_be_right_is_refused(tmp_path, change, words):
    where = ft.save_shards(ft.Federation.from_arrays(pairs(), pairs()), tmp_path / "rows")
    changed_index(where, change)
    with pytest.raises(InvalidData, match=words):
        ft.Federation.from_shards(where)


def test_a_file_that_unpacks_to_more_than_its_rows_is_refused(tmp_path):
    import hashlib

    where = ft.save_shards(ft.Federation.from_arrays(pairs(), pairs()), tmp_path / "rows")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train_x.npy", bytes(10_000_000))
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    changed_index(where, lambda index: index["clients"][0].update(sha256=digest))
    (where / json.loads((where / "index.json").read_text())["clients"][0]["file"]).write_bytes(buffer.getvalue())
    with pytest.raises(InvalidData, match="holds more rows than its index says"):
        ft.Federation.from_shards(where)


def test_generated_clients_lose_what_only_their_generator_knows_and_it_is_said(tmp_path):
    fed = ft.Federation.load("clup-regression", clients=3, rows=4, d=2)
    back = ft.Federation.from_shards(ft.save_shards(fed, tmp_path / "rows"))
    assert fed.truth is not None
    assert back.truth is None
    assert back.notes[-1].startswith("The true parameters")
