"""Columns as agreed on, in a file: read back as written, and nothing learnt from the rows."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedtailor as ft
from fedtailor import Federation, errors
from fedtailor.data.tables.agreed import columns_file
from fedtailor.engine.private import not_counted
from fedtailor.local import Private
from tests.data.test_tables import feature, said
from tests.package.test_bad_input import refused

FILE = """
format = 1
label = { name = "y", classes = ["well", "ill"] }

[columns.age]
type = "number"
range = [0, 100]
fill = 40
indicator = true

[columns.seen]
type = "date"
range = [2020-01-01, 2020-01-11]
fill = 2020-01-06

[columns.sex]
type = "category"
categories = ["f", "m"]

[columns.smokes]
type = "bool"
fill = true

[columns.dose]
type = "number"
range = [0, 2]
style = "decimal comma"
fill = 0
"""


def patients() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "who": list("aaabbb"),
            "y": ["ill", "well", "ill", "well", "ill", "well"],
            "part": ["train", "train", "test"] * 2,
            "age": [0, 100, None, 50, 75, 120],
            "seen": ["2020-01-01", "2020-01-11", None, "2020-01-06", "2020-01-02", "2020-01-03"],
            "sex": ["f", "m", "x", "f", None, "m"],
            "smokes": [True, False, None, True, True, False],
            "dose": ["0,5", "1", "2", "0", "1,5", None],
            "name": list("uvwxyz"),
        }
    )


@pytest.fixture
def columns(tmp_path) -> Path:
    (tmp_path / "columns.toml").write_text(FILE)
    return tmp_path / "columns.toml"


def read(frame: pd.DataFrame, columns: Path, **options) -> Federation:
    return Federation.from_table(frame, client="who", label="y", **{"split": "part", "columns": str(columns), **options})


def test_ranges_categories_and_fills_are_those_of_the_file(columns):
    made = read(patients(), columns)
    assert made.classes == ("well", "ill")
    assert made.train.y.tolist() == [1, 0, 0, 1]
    assert feature(made, "age") == ([-1, 1, 0, 0.5], [np.float32(-0.2), np.float32(1.4)])
    assert feature(made, "age missing") == ([0, 0, 0, 0], [1, 0])
    assert feature(made, "seen") == ([-1, 1, 0, np.float32(-0.8)], [0, np.float32(-0.6)])
    assert feature(made, "sex=f") == ([1, 0, 1, 0], [0, 0])
    assert feature(made, "sex=m") == ([0, 1, 0, 0], [0, 1])
    assert feature(made, "smokes") == ([1, 0, 1, 1], [1, 0])
    assert feature(made, "dose") == ([-0.5, 0, -1, 0.5], [1, -1])
    for words in (
        ["nothing was learnt from the rows"],
        ["does not name were left out: 'name'"],
        ["1 values of 'age' are outside its range"],
        ["1 values of 'sex' are not listed", "0 in all its features", "'x'"],
        ["1 missing values of 'sex'"],
        ["were filled as", "columns.toml"],
        ["range becomes -1 to 1"],
    ):
        assert said(made, *words), words
    np.testing.assert_array_equal(made.schema.encode(patients().iloc[:2]), made.train.client(0)[0].numpy())


def test_other_rows_change_nobodys_features(columns):
    frame = patients()
    other = frame.assign(age=[7, 9, 1000, 50, 75, 120], sex=["m", "m", "m", "f", None, "m"])
    one, two = read(frame, columns), read(other, columns)
    assert one.schema == two.schema
    assert torch.equal(one.train.client(1)[0], two.train.client(1)[0])  # b's rows are the same in both
    assert not torch.equal(one.train.client(0)[0], two.train.client(0)[0])


def test_what_is_written_is_read_again_and_says_the_same(tmp_path):
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"who": ["a", "b"] * 50, "y": draw.choice(["no", "yes"], 100), "n": draw.normal(50, 9, 100)})
    frame["w"] = draw.choice(["u", "v", None], 100)
    frame["d"] = (pd.Timestamp("2020-03-01") + pd.to_timedelta(draw.integers(0, 50, 100), "D")).strftime("%d.%m.%Y")
    frame["k"] = draw.integers(0, 9, 100).astype(float)
    frame.loc[::7, "k"] = np.nan
    frame["b"] = draw.random(100) < 0.3
    for standardize in ("pooled", "client"):
        learnt = Federation.from_table(frame, client="who", label="y", standardize=standardize)
        path = tmp_path / "columns.toml"
        path.write_text(columns_file(learnt))
        content = tomllib.loads(path.read_text())
        low, high = content["columns"]["n"]["range"]
        trained = learnt.schema.columns[0]
        assert low <= frame["n"].max() <= high + 1  # outliers may be in test rows
        assert high - low < 70
        assert content["columns"]["d"]["style"] == "day first"
        assert content["columns"]["k"] | {"range": [0.0, 8.0]} == content["columns"]["k"]
        given = Federation.from_table(frame, client="who", label="y", columns=str(path))
        assert given.schema.names() == learnt.schema.names()
        assert given.schema.columns[0].fill == trained.fill
        assert given.schema.public
        assert not learnt.schema.public
        assert torch.equal(given.train.y, learnt.train.y)
        numbers = [i for i, column in enumerate(given.schema.names()) if column in ("n", "k", "d")]
        assert float(given.train.x[:, numbers].abs().max()) <= 1 + 1e-6
        assert float(given.train.x[:, numbers].abs().amax(0).min()) > 0.95  # the ranges are no wider than the rows


def test_quantities_are_scaled_by_their_range(tmp_path):
    frame = pd.DataFrame({"who": ["a", "b"] * 20, "x": np.arange(40) % 7, "y": np.arange(40) * 2.5})
    path = tmp_path / "c.toml"
    path.write_text(columns_file(Federation.from_table(frame, client="who", label="y")))
    text = path.read_text()
    assert "range" in text.split("[columns")[0]
    content = tomllib.loads(text)
    made = Federation.from_table(frame, client="who", label="y", columns=str(path), standardize_label=True)
    low, high = content["label"]["range"]
    assert (made.schema.label_mean, made.schema.label_scale) == ((low + high) / 2, (high - low) / 2)
    assert said(made, "the range given becomes -1 to 1")


def test_privacy_counts_on_it(columns):
    frame = pd.concat([patients()] * 20, ignore_index=True)
    learnt = Federation.from_table(frame, client="who", label="y", features=["age"], split="part")
    given = read(frame, columns)
    assert any("--columns" in line for line in not_counted(learnt))
    assert not any("how the table was read: the scaling" in line for line in not_counted(given))
    run = ft.run(ft.FedAvg(opt=Private(noise=1.0)), given, rounds=1, seed=0)
    assert run.summary["not_counted"] == not_counted(given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("format = 1", "format = 2"), ["format 2"]),
        (('name = "y"', 'name = "z"'), ["label 'z'", "'y'"]),
        (('type = "bool"', 'type = "truth"'), ["'smokes'", "number, date, bool, category"]),
        (("range = [0, 100]", "range = [100, 0]"), ["'age'", "the smaller first"]),
        (("range = [0, 100]\n", ""), ["'age' has no range"]),
        (('categories = ["f", "m"]', 'categories = ["f"]'), ["'sex'"]),
        (("indicator = true", "indicate = true"), ["'indicate'"]),
        (('"decimal comma"', '"day first"'), ["'dose'", "'decimal comma'"]),
        (("[columns.age]", "[columns"), ["TOML"]),
        (('label = { name = "y", classes = ["well", "ill"] }', ""), ["no file of columns"]),
        (("fill = 40", 'fill = "x"'), ["no file of columns"]),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_its_entry(columns, change, words):
    columns.write_text(FILE.replace(*change))
    with refused(errors.InvalidArgument, "columns.toml", *words):
        read(patients(), columns)


def test_rows_that_do_not_fit_the_file_are_refused(columns):
    frame = patients()
    with refused(errors.InvalidData, "'dead' in row 2", "add it"):
        read(frame.assign(y=["ill", "dead", "ill", "well", "ill", "well"]), columns)
    with refused(errors.InvalidData, "'age'", "'old'", "row 1"):
        read(frame.assign(age=["old", 1, 2, 3, 4, 5]), columns)
    with refused(errors.InvalidData, "no column 'sex'"):
        read(frame.drop(columns="sex"), columns)
    columns.write_text(FILE.replace("fill = 40\n", ""))
    with refused(errors.InvalidData, "'age'", "no fill"):
        read(frame, columns)
    for options in ({"features": ["age"]}, {"drop": ["age"]}, {"standardize": "client"}):
        with refused(errors.InvalidArgument, "leave out --" + next(iter(options))):
            read(frame, columns, **options)
    with refused(errors.InvalidArgument, "no file", "--save-columns"):
        read(frame, Path("nowhere.toml"))
