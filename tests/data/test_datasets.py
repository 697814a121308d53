"""Federations from datasets, loaders and mappings of columns."""

from __future__ import annotations

import json
import random
import tomllib

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli import app
from fedtailor.errors import InvalidArgument, InvalidData

X = np.arange(60.0).reshape(20, 3)
Y = np.arange(20) % 2
FROM = ft.Federation.from_datasets


class Rows(Dataset):
    """Examples one by one: (x, y), or dicts."""

    def __init__(self, rows, named=False):
        self.rows, self.named = rows, named

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x, y = torch.from_numpy(X[self.rows[i]]), int(Y[self.rows[i]])
        return {"x": x, "label": y} if self.named else (x, y)


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(Rows(self.rows))


class Columns:
    """What a Hugging Face dataset looks like."""

    def __init__(self, **columns):
        self.column_names, self._columns = list(columns), columns

    def __getitem__(self, name):
        return iter(self._columns[name])


def sources(first, last):
    rows = np.arange(first, last)
    return {
        "pairs": (X[rows], Y[rows]),
        "mapping": {"x": X[rows], "label": Y[rows]},
        "columns": Columns(x=X[rows].tolist(), label=Y[rows].tolist()),
        "tensors": TensorDataset(torch.from_numpy(X[rows]), torch.from_numpy(Y[rows])),
        "dataset": Rows(rows),
        "dicts": Rows(rows, named=True),
        "loader": DataLoader(Rows(rows), batch_size=4),
        "stream": Stream(rows),
    }


@pytest.mark.parametrize("kind", sources(0, 2))
def test_every_kind_of_source_gives_the_same_rows(kind):
    cut = [(0, 8), (8, 12)]
    fed = FROM([sources(*ends)[kind] for ends in cut], [sources(12, 16)[kind], sources(16, 20)[kind]])
    for i, (first, last) in enumerate(cut):
        x, y = fed.train.client(i)
        np.testing.assert_array_equal(x, X[first:last])
        np.testing.assert_array_equal(y, Y[first:last])
    np.testing.assert_array_equal(fed.test.x, X[12:])


def test_clients_by_name_are_split_as_those_of_a_pool_are():
    fed = FROM({"north": (X[:12], Y[:12]), "south": (X[12:], Y[12:])}, val_share=0)
    assert fed.names == ("north", "south")
    assert [len(fed.train.client(i)[1]) for i in (0, 1)] == [9, 6]
    seen = np.concatenate([fed.train.client(0)[0], fed.test.client(0)[0]])
    np.testing.assert_array_equal(np.sort(seen[:, 0]), X[:12, 0])


def test_one_source_goes_by_a_column_or_is_dealt():
    pool = {"x": X, "label": Y, "who": ["b"] * 12 + ["a"] * 8}
    fed = FROM(pool, client="who")
    assert sorted(fed.names) == ["a", "b"]
    assert {float(v) for v in fed.test.client(fed.index("a"))[0][:, 0]} <= set(X[12:, 0])
    dealt = FROM((X, Y), clients=2, partition="classes:1", val_share=0)
    assert sorted({int(y) for y in dealt.train.client(i)[1]} for i in (0, 1)) in ([{0}, {1}], [{1}, {0}])
    both = FROM({"train": pool, "validation": pool, "test": pool}, client="who")
    assert len(both.train.y) == len(both.val.y) == len(both.test.y) == 20


def test_columns_are_chosen_and_weights_named():
    pool = {"age": X[:, 0], "height": X[:, 1], "note": ["n"] * 20, "outcome": Y, "w": np.ones(20), "who": ["a", "b"] * 10}
    fed = FROM(pool, label="outcome", columns=["age", "height"], client="who", weight="w", val_share=0)
    assert tuple(fed.train.x.shape[1:]) == (2,)
    assert torch.equal(fed.train.weights, torch.ones(len(fed.train.y), dtype=fed.train.weights.dtype))


def test_what_a_loader_draws_is_drawn_by_the_seed_and_leaves_the_callers_generator_alone():
    before = torch.get_rng_state()
    one, again = (FROM([DataLoader(Rows(range(20)), batch_size=6, shuffle=True)]) for _ in range(2))
    assert torch.equal(one.train.x, again.train.x)
    assert torch.equal(torch.get_rng_state(), before)


class Jittered(Rows):
    """Rows changed at random by NumPy and Python, as transforms often are."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x + np.random.rand() + random.random(), y


def test_what_transforms_draw_is_drawn_by_the_seed_whichever_generator_they_use():
    """Before: NumPy's and Python's were left to themselves, and every reading gave other rows."""
    read = [FROM([Jittered(np.arange(20))] * 2, seed=seed).train.x for seed in (3, 3, 4)]
    assert torch.equal(read[0], read[1])
    assert not torch.equal(read[0], read[2])
    np.random.seed(1)
    random.seed(1)
    undisturbed = np.random.rand(), random.random()
    np.random.seed(1)
    random.seed(1)
    FROM([Jittered(np.arange(20))] * 2)
    assert (np.random.rand(), random.random()) == undisturbed


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: FROM({"x": X, "size": Y}), InvalidData, "which column of train is the label"),
        (lambda: FROM({"x": X, "label": Y}, client="who"), InvalidData, "no column 'who'; its columns are x, label"),
        (lambda: FROM((X, Y), (X, Y)), InvalidArgument, "nobody says whose a row is"),
        (lambda: FROM([(X, Y)], clients=3), InvalidArgument, "one source per client already"),
        (lambda: FROM({"a": (X, Y)}, {"b": (X, Y)}), InvalidData, "not of the same clients"),
        (lambda: FROM([Stream([])]), InvalidData, "no rows"),
        (lambda: FROM(3), InvalidData, "give pairs"),
        (lambda: FROM((X, Y + 0.5), partition="dirichlet:0.3"), InvalidArgument, "goes by classes"),
    ],
)
def test_what_cannot_be_read_says_what_to_do(call, error, says):
    with pytest.raises(error, match=says):
        call()


SOURCE = """
import numpy as np

def rows(count=40):
    draw = np.random.default_rng(0)
    return {"x": draw.normal(size=(count, 3)), "label": draw.integers(0, 2, count)}
"""


def test_data_of_ones_own_on_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    flags = ["run", "fedavg", "mine.py:rows", "--clients", "3", "--with", "count=60", "--rounds", "2", "--out", "done", "--json"]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["clients"] == 3
    kept = tomllib.loads((tmp_path / "done/config.toml").read_text())
    assert kept["data"].startswith("mine.py:rows@")
    assert kept["with"] == {"count": 60}
    assert CliRunner().invoke(app, ["resume", "done"]).exit_code == 0
    (tmp_path / "mine.py").write_text(SOURCE.replace("default_rng(0)", "default_rng(1)"))
    from fedtailor.algorithms import origin

    origin._functions.clear()  # as in a new process
    result = CliRunner().invoke(app, ["resume", "done"])
    assert result.exit_code == 2
    assert "now holds another rows" in " ".join(result.output.split())
