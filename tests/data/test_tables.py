"""Tables and folders as federations: every rule on a table small enough to work out by hand, every refusal by its words."""

from __future__ import annotations

import datetime
import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedtailor as ft
from fedtailor import Federation, errors
from fedtailor.data.schema import Column, Schema
from fedtailor.data.tables.draw import draw_all, draw_parts, sort_by
from fedtailor.data.tables.features import median
from fedtailor.data.words import text
from tests.package.test_bad_input import refused

SPLIT = ["train", "train", "test", "train", "train", "test"]  # of two clients with three rows each


def small(**columns) -> pd.DataFrame:
    """Two clients with two training rows and one test row each; a usable column beside those given."""
    return pd.DataFrame({"who": list("aaabbb"), "y": [0, 1, 0, 1, 0, 1], "part": SPLIT, "x": [1.0, 2, 3, 4, 5, 6], **columns})


def read(frame: pd.DataFrame, **options) -> Federation:
    return Federation.from_table(frame, **{"client": "who", "label": "y", "split": "part", "standardize": "none", **options})


def feature(made: Federation, name: str) -> tuple[list[float], list[float]]:
    """A feature's training and test values."""
    assert made.schema is not None
    j = made.schema.names().index(name)
    return made.train.x[:, j].tolist(), made.test.x[:, j].tolist()


def said(made: Federation, *words: str) -> bool:
    return any(all(word in note for word in words) for note in made.notes)


def many(rows: int = 400, clients: int = 4, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "who": [f"site {i}" for i in draw.integers(clients, size=rows)],
            "y": draw.choice(["no", "yes", "maybe"], rows, p=[0.5, 0.3, 0.2]),
            "dose": draw.normal(10, 3, rows),
            "ward": draw.choice(list("ABCDE"), rows),
            "old": draw.random(rows) < 0.3,
            "seen": pd.Timestamp("2020-01-01") + pd.to_timedelta(draw.integers(0, 999, rows), "D"),
        }
    )
    frame.loc[draw.random(rows) < 0.1, "dose"] = np.nan
    frame.loc[draw.random(rows) < 0.05, "ward"] = None
    return frame


# -- columns -----------------------------------------------------------------------------------------------------------


def test_numbers_stay_numbers_and_rows_stay_with_their_clients():
    made = read(small())
    assert made.names == ("a", "b")
    assert made.train.x[:, 0].tolist() == [1, 2, 4, 5]
    assert made.test.x[:, 0].tolist() == [3, 6]
    assert made.train.y.tolist() == [0, 1, 1, 0]
    assert made.train.offsets.tolist() == [0, 2, 4]
    assert made.train.x.dtype == torch.float32
    assert made.val is None
    assert made.recipe is None


def test_truth_values_become_0_and_1():
    made = read(small(b=[True, False, True, True, False, False]))
    assert feature(made, "b") == ([1, 0, 1, 0], [1, 0])


def test_words_become_one_feature_per_category_of_the_training_rows():
    made = read(small(city=["rome", "oslo", "kyiv", "rome", "oslo", "rome"]))
    assert feature(made, "city=oslo") == ([0, 1, 0, 1], [0, 0])
    assert feature(made, "city=rome") == ([1, 0, 1, 0], [0, 1])
    assert "city=kyiv" not in made.schema.names()  # it is in a test row only
    assert said(made, "1 values of 'city' that no training row has", "0 in all its features")


def test_the_30_most_frequent_categories_are_kept_and_the_rest_is_other():
    rows = [(who, f"c{i:02}") for who in "ab" for i in range(32) for _ in range(1 if i in (3, 7) else 2)]
    frame = pd.DataFrame(rows, columns=["who", "code"])
    frame["y"] = np.arange(len(frame)) % 2
    frame["part"] = "train"
    tests = pd.DataFrame({"who": ["a", "b"], "code": ["c03", "new"], "y": [0, 1], "part": "test"})
    made = read(pd.concat([frame, tests]))
    categories = made.schema.columns[0].categories
    assert len(categories) == 31
    assert "other" in categories
    assert not {"c03", "c07"} & set(categories)
    train, test = feature(made, "code=other")
    assert sum(train) == 4
    assert test == [1, 1]
    assert said(made, "32 values", "30 most frequent")


def test_dates_become_days_since_the_earliest_training_date():
    days = ["2020-03-01", "2020-02-28", "2020-02-01", "2020-03-02", "2021-02-28", "2020-02-28T12:00"]
    expected = ([2, 0, 3, 366], [-27, 0.5])  # 2020 is a leap year
    for values in (days, [pd.Timestamp(day) for day in days]):
        made = read(small(day=values))
        assert feature(made, "day") == expected
        assert said(made, "days since 2020-02-28")
    made = read(small(day=[datetime.date.fromisoformat(day[:10]) for day in days]))
    assert feature(made, "day") == (expected[0], [-27, 0])


def test_text_that_differs_in_every_row_is_left_out_and_said():
    made = read(small(name=["ann", "bo", "cy", "di", "ed", "flo"]))
    assert made.schema.names() == ["x"]
    assert said(made, "left out", "'name'", "every row")


def test_a_column_that_is_constant_in_the_training_rows_is_left_out_and_said():
    made = read(small(flat=[7, 7, 8, 7, 7, 9], word=["w"] * 6))
    assert made.schema.names() == ["x"]
    assert said(made, "'flat'", "same in every training row")
    assert said(made, "'word'")


def test_empty_and_nameless_columns_are_left_out_and_said():
    made = read(small(none=[None] * 6, **{"Unnamed: 0": range(6)}))
    assert made.schema.names() == ["x"]
    assert said(made, "'none': empty")
    assert said(made, "'Unnamed: 0'", "no name")


def test_numbers_written_as_text_are_numbers():
    assert feature(read(small(n=["1", "2.5", "3", "-4", "5e1", None])), "n") == ([1, 2.5, -4, 50], [3, 2.5 + (1 - 2.5) / 2])


def test_a_column_of_mostly_numbers_is_refused_by_its_first_word():
    with refused(errors.InvalidData, "'n'", "'low'", "row 4", "--drop 'n'"):
        read(small(n=["1", "2", "3", "low", "5", "high"]))


def test_a_column_of_mostly_words_is_a_category():
    made = read(small(n=["1", "x", "x", "1", "x", "y"]))
    assert feature(made, "n=1") == ([1, 0, 1, 0], [0, 0])


def test_a_categorical_column_of_numbers_is_a_category():
    made = read(small(n=pd.Categorical([10, 20, 10, 10, 20, 20])))
    assert feature(made, "n=10") == ([1, 0, 1, 0], [1, 0])


def test_only_the_features_asked_for_are_used_and_dropped_ones_are_not():
    frame = small(u=[1, 2, 3, 4, 5, 7], v=[2, 1, 2, 1, 2, 1])
    assert read(frame, features=["v", "u"]).schema.names() == ["v", "u"]
    assert read(frame, drop=["x", "u"]).schema.names() == ["v"]


def test_a_column_that_counts_the_rows_is_pointed_out():
    frame = many()
    frame["id"] = range(len(frame))
    made = Federation.from_table(frame, client="who", label="y")
    assert said(made, "'id'", "--drop")


# -- missing values ----------------------------------------------------------------------------------------------------


def test_missing_numbers_take_the_median_of_the_training_rows_and_an_indicator():
    made = read(small(n=[1, None, None, 2, 9, 4]))
    assert feature(made, "n") == ([1, 2, 2, 9], [2, 4])
    assert feature(made, "n missing") == ([0, 1, 0, 0], [1, 0])
    assert said(made, "'n' (2)", "median")


def test_an_indicator_needs_one_percent_of_the_training_rows():
    rows = 400
    frame = pd.DataFrame({"who": ["a", "b"] * (rows // 2), "y": [0, 1, 1, 0] * (rows // 4), "x": np.arange(rows) % 7})
    frame["part"] = ["train"] * (rows - 2) + ["test"] * 2
    for gaps, names in ((3, ["x", "n"]), (4, ["x", "n", "n missing"])):
        frame["n"] = np.where(np.arange(rows) < gaps, np.nan, np.arange(rows) % 5)
        assert read(frame).schema.names() == names


def test_a_missing_word_is_a_category_of_its_own():
    made = read(small(w=["u", None, "u", "v", "NA", ""]))
    assert feature(made, "w=missing") == ([0, 1, 0, 1], [0, 1])


def test_a_missing_truth_value_takes_the_more_frequent_one():
    made = read(small(b=[True, None, None, True, False, False]))
    assert feature(made, "b") == ([1, 1, 1, 0], [1, 0])
    assert feature(made, "b missing") == ([0, 1, 0, 0], [1, 0])


def test_rows_with_missing_values_can_be_left_out():
    frame = pd.concat([small(n=[1, 2, 3, 4, 5, 6]), small(n=[None, 2, 3, 4, None, 6])])
    made = read(frame, missing="drop")
    assert len(made.train.y) + len(made.test.y) == 10
    assert said(made, "2 rows with missing values", "'n' (2)")


def test_missing_values_can_be_refused():
    with refused(errors.InvalidData, "'n' (2)", "'w' (1)", "--missing fill"):
        read(small(n=[1, None, 3, 4, None, 6], w=["u", "v", None, "u", "v", "u"]), missing="refuse")


def test_rows_without_a_label_or_a_client_are_left_out_and_said():
    frame = small()
    extra = pd.DataFrame({"who": [None, "a", "b"], "y": [1, None, None], "part": "train", "x": [9.0, 9, 9]})
    made = read(pd.concat([frame, extra]))
    assert len(made.train.y) == 4
    assert said(made, "1 rows without a client")
    assert said(made, "2 rows without a label")


def test_an_infinite_value_is_refused_by_column_and_row():
    with refused(errors.InvalidData, "'n'", "row 5", "replace or drop"):
        read(small(n=[1, 2, 3, 4, -np.inf, 6]))


def test_an_infinite_value_in_a_row_that_is_left_out_does_no_harm():
    frame = pd.concat([small(), pd.DataFrame({"who": [None], "y": [1], "part": ["train"], "x": [np.inf]})])
    assert len(read(frame).train.y) == 4


def test_values_beyond_32_bits_are_refused_by_column():
    with refused(errors.InvalidData, "'n'", "rescale"):
        read(small(n=[1, 2, 3, 4, 5, 1e300]))


# -- standardising -----------------------------------------------------------------------------------------------------


def test_pooled_standardising_uses_all_training_rows_and_only_those():
    made = read(small(x=[1, 3, 100, 5, 7, 4]), standardize="pooled")  # mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    column = made.schema.columns[0]
    assert (column.mean, column.scale) == (4, np.sqrt(5))
    np.testing.assert_allclose(made.train.x[:, 0], np.array([-3, -1, 1, 3]) / np.sqrt(5), rtol=1e-6)
    np.testing.assert_allclose(made.test.x[:, 0], np.array([96, 0]) / np.sqrt(5), rtol=1e-6)
    assert said(made, "all clients' training rows")


def test_a_client_standardises_by_its_own_training_rows_and_a_newcomer_by_all():
    frame = small(x=[1, 3, 100, 0.1, 0.1, 4])  # a: mean 2, scale 1; b: constant, so its scale counts as 1
    made = read(frame, standardize="client")
    np.testing.assert_allclose(made.train.x[:, 0], [-1, 1, 0, 0], atol=1e-7)
    np.testing.assert_allclose(made.test.x[:, 0], [98, 3.9], rtol=1e-6)
    values = np.array([1, 3, 0.1, 0.1])
    np.testing.assert_allclose(made.schema.encode(frame, "c")[:, 0], (frame["x"] - values.mean()) / values.std(), rtol=1e-6)
    np.testing.assert_array_equal(made.schema.encode(frame, "c"), made.schema.encode(frame))


def test_categories_indicators_and_truth_values_are_not_standardised():
    made = read(small(w=list("uvuvuv"), b=[True, False] * 3, n=[1, None, 3, 4, 5, 6]), standardize="pooled")
    for name in ("w=u", "w=v", "b", "n missing"):
        assert set(feature(made, name)[0]) == {0.0, 1.0}


# -- the label ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "kind", "classes"),
    [
        (["no", "yes"] * 30, "classification", ("no", "yes")),
        ([True, False] * 30, "classification", ("False", "True")),
        ([10, 9, 2] * 20, "classification", ("2", "9", "10")),
        ([1.0, 0.0] * 30, "classification", ("0", "1")),
        ([0.5, 1.5] * 30, "regression", ()),
        (list(range(6)) * 10, "classification", tuple("012345")),
        (list(range(10)) * 6, "regression", ()),  # 6 rows of each are too few for classes
        (list(range(60)), "regression", ()),
        (["3", "10"] * 30, "classification", ("3", "10")),
        (["1", "2", "many"] * 20, "classification", ("1", "2", "many")),
    ],
)
def test_the_task_is_guessed_from_the_label_and_said(labels, kind, classes):
    frame = pd.DataFrame({"who": ["a"] * 30 + ["b"] * 30, "y": labels, "x": np.arange(60) % 7})
    made = Federation.from_table(frame, client="who", label="y")
    assert (made.kind, made.classes, made.labels) == (kind, classes, len(classes))
    assert said(made, f"The task is {kind}", "because")


def test_the_task_can_be_told():
    frame = pd.DataFrame({"who": ["a", "b"] * 30, "y": list(range(10)) * 6, "x": np.arange(60) % 7})
    made = Federation.from_table(frame, client="who", label="y", task="classification")
    assert made.labels == 10
    frame["y"] = [0, 1] * 30
    made = Federation.from_table(frame, client="who", label="y", task="regression")
    assert made.kind == "regression"
    assert set(made.train.y.tolist()) <= {0.0, 1.0}


def test_targets_keep_their_units_unless_asked():
    frame = small(y=[1000.5, 3000.5, 0.5, 1000.5, 3000.5, 4000.5])
    made = read(frame)
    assert made.train.y.tolist() == [1000.5, 3000.5, 1000.5, 3000.5]
    assert made.train.y.dtype == torch.float32
    made = read(frame, standardize_label=True)  # mean 2000.5, scale 1000
    assert made.train.y.tolist() == [-1, 1, -1, 1]
    assert made.test.y.tolist() == [-2, 2]
    assert (made.schema.label_mean, made.schema.label_scale) == (2000.5, 1000)
    assert made.schema.restore(made.test.y.double().numpy()).tolist() == [0.5, 4000.5]
    assert said(made, "in those units")


def test_a_class_that_no_training_row_has_is_pointed_out():
    made = read(small(y=["u", "v", "w", "u", "v", "u"]))
    assert made.classes == ("u", "v", "w")
    assert said(made, "No training row", "'w'")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([1] * 6, "every row"),
        (["u"] * 6, "every row"),
        ([0.5] * 6, "every row"),
        (list("uvwxyz"), "6 classes in 6 rows"),
        (pd.to_datetime(["2020-01-01"] * 6), "dates"),
        ([1, 2, 3, 4, 5, np.inf], "infinite"),
        ([None] * 6, "no row has both"),
    ],
)
def test_a_label_with_nothing_to_predict_is_refused(labels, words):
    with refused(errors.InvalidData, words):
        read(small(y=labels))


def test_a_word_among_numbers_to_predict_is_refused_by_row():
    with refused(errors.InvalidData, "row 2", "'two'"):
        read(small(y=[1.5, "two", 3, 4, 5, 6]), task="regression")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": [1, 2, 3, 4, 5, np.inf]}, ["'y'", "infinite in row 6", "replace it, or remove the row"]),
        ({"y": [*map(str, range(20)), "low", *map(str, range(21, 24))]}, ["'y'", "'low' in row 21", "remove the row"]),
        ({"y": [0, 1, 0, 1, 0, [1]]}, ["'y'", "list in row 6", "remove the row"]),
        ({"y": [1j, 2, 3, 4, 5, 6]}, ["'y'", "complex", "real ones"]),
        ({"who": ["a", "a", "a", "b", ["b"], "b"]}, ["'who'", "list in row 5", "remove the row"]),
        ({"part": [*SPLIT[:5], ("test",)]}, ["'part'", "tuple in row 6", "remove the row"]),
    ],
)
def test_no_one_is_told_to_drop_the_label_the_client_or_the_split(change, words):
    rows = len(next(iter(change.values())))
    frame = pd.concat([small()] * (rows // 6), ignore_index=True).assign(**change)
    with pytest.raises(errors.InvalidData) as caught:
        read(frame)
    assert all(word in str(caught.value) for word in words)
    assert "--drop" not in str(caught.value)


# -- clients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "names"),
    [
        ([10, 9, 2], ("2", "9", "10")),
        ([10.0, 9.0, None], ("9", "10")),
        (["b", "a", "C"], ("C", "a", "b")),
        (["10", "9", "2"], ("2", "9", "10")),
        ([True, False, True], ("False", "True")),
        ([2**60, 2**60 + 1, 5], ("5", str(2**60), str(2**60 + 1))),
        ([1, "1", "2"], ("1", "2")),
    ],
)
def test_clients_are_named_as_written_and_sorted(clients, names):
    frame = pd.DataFrame({"who": pd.Series(clients * 6, dtype=object), "y": [0, 1, 1] * 6, "x": np.arange(18) % 5})
    frame["who"] = frame["who"].infer_objects()
    assert Federation.from_table(frame, client="who", label="y").names == names


def test_whole_numbers_close_together_are_the_clients_they_say():
    who = np.array([7, -2, 3, 7] * 5)  # from -2 to 7, most of them nobody
    frame = pd.DataFrame({"who": who, "y": [0, 1] * 10, "x": np.arange(20.0)})
    made = Federation.from_table(frame, client="who", label="y", standardize="none")
    assert made.names == ("-2", "3", "7")
    for i, name in enumerate(made.names):
        rows = torch.cat([part.client(i)[0] for part in (made.train, made.test, made.val)])[:, 0]
        assert sorted(rows.tolist()) == np.flatnonzero(who == int(name)).tolist()


def test_every_client_is_split_class_by_class():
    frame = many(4000)
    made = Federation.from_table(frame, client="who", label="y")
    for i, name in enumerate(made.names):
        mine = frame[frame["who"] == name]
        for part, share in ((made.train, 0.6), (made.test, 0.25), (made.val, 0.15)):
            y = part.client(i)[1].numpy()
            assert abs(len(y) - share * len(mine)) <= 1
            for label, kind in enumerate(made.classes):
                assert abs((y == label).sum() - share * (mine["y"] == kind).sum()) <= 2


def test_every_row_is_in_one_part():
    frame = many()
    frame["x"] = np.arange(len(frame))
    made = Federation.from_table(frame, client="who", label="y", features=["x"], standardize="none")
    rows = torch.cat([made.train.x, made.test.x, made.val.x])[:, 0]
    assert sorted(rows.tolist()) == list(range(len(frame)))
    for i, name in enumerate(made.names):
        assert (frame["who"].to_numpy()[made.test.client(i)[0][:, 0].numpy().astype(int)] == name).all()


def test_a_clients_split_depends_on_its_own_rows_only():
    frame = many()
    frame["x"] = np.arange(len(frame))
    options = {"client": "who", "label": "y", "features": ["x"], "standardize": "none"}
    made = Federation.from_table(frame, **options)
    some = Federation.from_table(frame[frame["who"] != "site 0"], **options)
    turned = frame.iloc[np.argsort(-frame["who"].str[-1].astype(int).to_numpy(), kind="stable")]  # clients in another order
    other = Federation.from_table(turned, **options)
    for name in some.names:
        whole = made.test.client(made.index(name))[0]
        assert torch.equal(whole, some.test.client(some.index(name))[0])
        assert torch.equal(whole, other.test.client(other.index(name))[0])


def test_another_seed_is_another_split_and_the_same_seed_the_same():
    first, again, other = (Federation.from_table(many(), client="who", label="y", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.train.x, again.train.x)
    assert first.train.x.shape != other.train.x.shape or not torch.equal(first.train.x, other.train.x)


def test_the_draw_does_not_depend_on_how_clients_are_grouped():
    draw = np.random.default_rng(0)
    sizes = draw.integers(3, 3000, 60)
    stratum = draw.integers(0, 3, sizes.sum())
    names = [f"c{i}" for i in range(60)]
    args = (names, ["u", "v", "w"], (0.6, 0.25, 0.15), 5)
    np.testing.assert_array_equal(draw_all(sizes, stratum, *args), draw_parts(sizes, stratum, *args))


@pytest.mark.parametrize("high", [50, 2**45])
def test_packed_sorting_is_a_stable_sort_by_two_keys(high):
    draw = np.random.default_rng(0)
    major, minor = draw.integers(0, high, 500), draw.integers(0, 20, 500).astype(np.uint64)
    expected = sorted(range(500), key=lambda i: (major[i], minor[i], i))
    assert sort_by(major, minor).tolist() == expected


@pytest.mark.parametrize("rows", [1, 2, 7, 150_000, 150_001])
def test_the_median_of_many_values_is_the_median(rows):
    draw = np.random.default_rng(0)
    for values in (draw.normal(size=rows), draw.integers(0, 2, rows).astype(float), np.sort(draw.exponential(size=rows))):
        assert median(values) == np.median(values)


def test_the_split_column_is_followed_in_any_case():
    frame = pd.concat([small(part=["Train", "TRAIN ", "test", "train", "train", "Test"]), small(part=["val", "Validation"] * 3)])
    made = read(frame)
    assert (len(made.train.y), len(made.test.y), len(made.val.y)) == (4, 2, 6)


def test_no_validation_part_if_its_share_is_zero():
    made = Federation.from_table(many(), client="who", label="y", val_share=0.0)
    assert made.val is None
    assert len(made.train.y) + len(made.test.y) == 400


def test_small_clients_are_refused_by_name_or_left_out():
    frame = pd.concat([many(), pd.DataFrame({"who": list("aabbcd"), "y": "no", "dose": 1.0})])
    with refused(errors.InvalidData, "'a', 'b', 'c', 'd'", "3 rows", "--min-samples 3"):
        Federation.from_table(frame, client="who", label="y")
    made = Federation.from_table(frame, client="who", label="y", min_samples=3)
    assert len(made) == 4
    assert said(made, "4 clients with fewer than 3 rows", "'a'")
    with refused(errors.InvalidData, "no client has 4000 rows", "--min-samples"):
        Federation.from_table(frame, client="who", label="y", min_samples=4000)


def test_more_than_five_small_clients_are_counted():
    frame = pd.concat([many(), pd.DataFrame({"who": list("abcdefgh"), "y": "no", "dose": 1.0})])
    with refused(errors.InvalidData, "and 3 more"):
        Federation.from_table(frame, client="who", label="y")


def test_a_client_without_test_rows_is_refused_by_name_or_left_out():
    frame = pd.concat([small(), small(who=list("cccddd"), part=["train"] * 3 + SPLIT[3:])])
    with refused(errors.InvalidData, "'c'", "part"):
        read(frame)
    assert read(frame, min_samples=1).names == ("a", "b", "d")


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"client": "wo"}, ["client column 'wo'", "did you mean 'who'"]),
        ({"label": "zzz"}, ["label column 'zzz'", "the columns are 'who', 'y', 'part', 'x'"]),
        ({"client": "y"}, ["both the client and the label"]),
        ({"split": "parts"}, ["split column 'parts'", "did you mean 'part'"]),
        ({"split": "y"}, ["'y' is named as label and split"]),
        ({"features": ["z"]}, ["feature column 'z'"]),
        ({"features": ["y"]}, ["'y' is the label"]),
        ({"features": "x"}, ["list of column names"]),
        ({"drop": ["z"]}, ["column to drop 'z'"]),
        ({"task": "ranking"}, ["task='ranking'", "classification, regression"]),
        ({"standardize": "yes"}, ["standardize='yes'"]),
        ({"missing": "keep"}, ["missing='keep'"]),
        ({"min_samples": 0}, ["min_samples=0"]),
        ({"test_share": 0.0}, ["test_share=0.0"]),
        ({"test_share": 0.8, "val_share": 0.2}, ["val_share=0.2"]),
        ({"test_share": float("nan")}, ["test_share=nan"]),
    ],
)
def test_an_argument_out_of_range_is_refused(options, words):
    with refused(errors.InvalidArgument, *words):
        read(small(), **options)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (small(who=["a"] * 6), ["one client", "two or more", "--client"]),
        (small(who=list("abcdef")), ["almost one per row", "--client"]),
        (small(part=["train", "later"] * 3), ["'later'", "row 2", "train, val or test"]),
        (small(part=["train", None] * 3), ["nothing", "row 2"]),
        (small().drop(columns="x"), ["no column can be used"]),
        (small(x=[1] * 6), ["no column can be used", "same in every"]),
        (small().iloc[:0], ["no rows"]),
        (small(c=[1j] * 6), ["'c'", "complex"]),
        (small(c=[[1]] * 6), ["'c'", "list", "row 1"]),
    ],
)
def test_a_table_that_cannot_be_learned_from_is_refused(frame, words):
    with refused(errors.InvalidData, *words):
        read(frame)


def test_two_columns_of_the_same_name_are_refused(tmp_path):
    frame = small(z=range(6)).rename(columns={"z": "x"})
    with refused(errors.InvalidData, "two columns are called 'x'"):
        read(frame)
    frame.to_csv(tmp_path / "t.csv", index=False)
    with refused(errors.InvalidData, "two columns called 'x'"):
        Federation.from_table(tmp_path / "t.csv", client="who", label="y")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", b"", ["empty"]),
        ("t.csv", b"\n\n", ["empty"]),
        ("t.csv", b"who,y,x\n", ["header but no rows"]),
        ("t.csv", b"who,y\n\x00\x01\x02\x80", ["not text"]),
        ("t.csv", "who,y,x\na,1,2\n".encode("utf-16"), ["UTF-16", "UTF-8"]),
        ("t.csv", b"who,y,x\n\xe9,1,2\n", ["not UTF-8", "0xe9"]),
        ("t.csv", b"who,y,x\na,1,2\nb,1,2,3\n", ["line 3 has 4 values", "header has 3"]),
        ("t.csv", b"who,y,x\na,1,2,3\nb,1,2,3\n", ["line 2 has more values"]),
        ("t.csv", b'who,y,x\na,1,"2\n', ["never closed"]),
        ("t.csv", b"who;y;x\na;1;2\n", ["separated by ';'"]),
        ("t.csv.gz", b"who,y,x\na,1,2\n", ["gzip"]),
        ("t.csv.gz", gzip.compress(b"who,y,x\na,1,2\n" * 99, mtime=0)[:-9], ["gzip"]),
        ("t.parquet", b"who,y,x\na,1,2\n", ["cannot be read"]),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with refused(errors.InvalidData, *words):
        Federation.from_table(tmp_path / name, client="who", label="y")


def test_a_path_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    (tmp_path / "t.doc").write_bytes(b"x")
    for path, words in (
        (tmp_path / "none.csv", ["no file", "none.csv", "check the path"]),
        (tmp_path, ["folder", "from_folder"]),
        (tmp_path / "t.xlsx", ["spreadsheet", ".csv"]),
        (tmp_path / "t.doc", ["t.doc", ".parquet"]),
        ([1, 2], ["DataFrame", "list"]),
    ):
        with refused(errors.InvalidArgument, *words):
            Federation.from_table(path, client="who", label="y")


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "t.parquet", "T.CSV"])
def test_a_file_gives_what_its_data_frame_gives(tmp_path, name):
    frame, path = many(), tmp_path / name
    if name.endswith("parquet"):
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if "tsv" in name else ",")
    made, expected = (Federation.from_table(source, client="who", label="y") for source in (path, frame))
    assert torch.equal(made.train.x, expected.train.x)
    assert torch.equal(made.val.y, expected.val.y)
    assert made.schema == expected.schema
    assert made.name == name
    assert expected.name == "table"


def test_a_file_is_read_the_same_with_and_without_pyarrow(tmp_path):
    many().to_csv(tmp_path / "t.csv", index=False)
    made = []
    for storage in ("auto", "python"):
        with pd.option_context("mode.string_storage", storage):
            made.append(Federation.from_table(tmp_path / "t.csv", client="who", label="y"))
    assert torch.equal(made[0].train.x, made[1].train.x)
    assert made[0].schema == made[1].schema
    assert made[0].notes == made[1].notes


def test_the_recipe_makes_the_same_federation_again(tmp_path, monkeypatch):
    many().to_csv(tmp_path / "t.csv", index=False)
    monkeypatch.chdir(tmp_path)
    made = Federation.from_table("t.csv", client="who", label="y", drop=["old"], seed=3, test_share=0.25)
    assert made.recipe == {"data": str(tmp_path / "t.csv"), "client": "who", "label": "y", "drop": ["old"], "seed": 3}
    options = json.loads(json.dumps(made.recipe))
    monkeypatch.chdir("/")
    again = Federation.from_table(options.pop("data"), **options)
    assert torch.equal(made.train.x, again.train.x)


def test_a_column_whose_type_changes_down_the_file_is_read_as_one(tmp_path):
    rows = 300_000
    codes = np.where(np.arange(rows) < rows // 2, "007", "x7")
    frame = pd.DataFrame({"who": np.arange(rows) % 3, "y": np.arange(rows) % 2, "code": codes})
    frame.to_csv(tmp_path / "t.csv", index=False)
    made = Federation.from_table(tmp_path / "t.csv", client="who", label="y")
    assert made.schema.names() == ["code=007", "code=x7"]


def test_a_table_of_many_rows_is_encoded_as_a_small_one():
    rows = 120_000  # enough for several threads and blocks
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"who": draw.integers(0, 50, rows), "y": draw.integers(0, 2, rows), "x": draw.normal(size=rows)})
    frame["w"] = draw.choice(list("uvw"), rows)
    made = Federation.from_table(frame, client="who", label="y")
    for i, name in enumerate(made.names[:5]):
        mine = made.schema.encode(frame[frame["who"] == int(name)], name)
        parts = np.concatenate([part.client(i)[0] for part in (made.train, made.test, made.val)])
        np.testing.assert_array_equal(np.sort(mine, 0), np.sort(parts, 0))


# -- schema ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("standardize", ["pooled", "client", "none"])
def test_new_rows_are_read_as_the_training_rows_were(standardize):
    frame = many()
    frame["part"] = np.random.default_rng(1).choice(["train", "val", "test"], len(frame))
    made = read(frame, standardize=standardize)
    back = Schema.from_json(json.loads(json.dumps(made.schema.to_json())))
    assert back == made.schema
    for i, name in enumerate(made.names):
        for part_name, split in (("train", made.train), ("val", made.val), ("test", made.test)):
            rows = frame[(frame["who"] == name) & (frame["part"] == part_name)]
            np.testing.assert_array_equal(back.encode(rows, name), split.client(i)[0].numpy())


def test_new_rows_may_be_few_and_of_other_types():
    made = read(small(w=["1", "x", "x", "1", "x", "y"], b=[True, False] * 3, d=["2020-01-01", "2020-01-02"] * 3), drop=["x"])
    names = made.schema.names()
    assert names == ["w=1", "w=x", "b", "d"]
    new = pd.DataFrame({"extra": [0], "d": [pd.Timestamp("2020-01-05")], "b": [1], "w": [1]})
    assert made.schema.encode(new).tolist() == [[1, 0, 1, 4]]
    assert made.schema.encode(pd.DataFrame({"w": ["new"], "b": ["False"], "d": [None]})).tolist() == [[0, 0, 0, 0.5]]
    assert made.schema.encode(new.iloc[:0]).shape == (0, 4)


def test_words_that_a_file_of_new_rows_turns_into_numbers_are_still_those_words(tmp_path):
    lines = ["a,0,train,007,true", "a,1,train,1.50,no", "a,0,test,x7,no", "b,1,train,x7,no", "b,0,train,x7,no", "b,1,test,x7,no"]
    (tmp_path / "t.csv").write_text("\n".join(["who,y,part,code,flag", *lines]))
    schema = read(tmp_path / "t.csv").schema
    assert schema.names() == ["code=007", "code=1.50", "code=x7", "flag=no", "flag=true"]
    (tmp_path / "new.csv").write_text("code,flag\n007,true\n1.50,true\n8,false\n")
    new = pd.read_csv(tmp_path / "new.csv")
    assert [dtype.kind for dtype in new.dtypes] == ["f", "b"]
    assert schema.encode(new).tolist() == [[1, 0, 0, 0, 1], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0]]


def test_a_number_that_may_be_two_words_is_the_one_it_reads_as():
    schema = read(small(code=["7", "007", "x", "x", "x", "7"])).schema
    assert schema.columns[1].categories == ("007", "7", "x")
    assert schema.encode(pd.DataFrame({"x": [0], "code": [7]})).tolist() == [[0, 0, 1, 0]]


def test_a_long_whole_number_is_not_taken_for_its_neighbour():
    schema = read(small(code=pd.Categorical([2**60, 5, 5, 2**60, 5, 5]))).schema
    assert schema.encode(pd.DataFrame({"x": [0, 0], "code": [2**60, 2**60 + 1]})).tolist() == [[0, 1, 0], [0, 0, 0]]


def test_new_rows_that_do_not_fit_are_refused():
    schema = read(small(n=[1, 2, 3, 4, 5, 7], b=[True, False] * 3, d=["2020-01-01", "2020-01-02"] * 3), drop=["x"]).schema
    good = pd.DataFrame({"n": [1.0], "b": [True], "d": ["2020-01-01"]})
    assert schema.encode(good).shape == (1, 3)
    for change, words in (
        ({"n": ["low"]}, ["'n'", "numbers", "row 1", "'low'"]),
        ({"n": [np.inf]}, ["'n'", "infinite"]),
        ({"n": [1e300]}, ["'n'", "too large"]),
        ({"b": [3]}, ["'b'", "true or false", "'3'"]),
        ({"d": ["soon"]}, ["'d'", "YYYY-MM-DD", "'soon'"]),
        ({"d": [5]}, ["'d'", "'5'"]),
    ):
        with refused(errors.InvalidData, *words):
            schema.encode(good.assign(**change))
    with refused(errors.InvalidData, "no column 'b', 'd'", "add it"):
        schema.encode(good[["n"]])


def test_a_schema_of_another_version_or_with_holes_is_refused():
    schema = Schema((Column("x", "numeric", mean=0.1, scale=1 / 3),), "who", "y", "regression")
    data = schema.to_json()
    assert Schema.from_json(data) == schema
    with refused(errors.InvalidData, "version 2"):
        Schema.from_json({**data, "version": 2})
    with refused(errors.InvalidData, "cannot be read"):
        Schema.from_json({**data, "columns": [{"name": "x"}]})
    with refused(errors.InvalidData, "version None"):
        Schema.from_json([])


def test_values_are_written_as_in_a_table():
    values = [3.0, 0.1, True, 7, "a", pd.Timestamp("2020-01-01"), np.float32(2), "\ud800"]
    assert [text(value) for value in values] == ["3", "0.1", "True", "7", "a", "2020-01-01", "2", "?"]


def test_the_users_data_frame_is_left_as_it_was():
    frame = many()
    copy = frame.copy(deep=True)
    Federation.from_table(frame, client="who", label="y")
    pd.testing.assert_frame_equal(frame, copy)


def test_a_table_trains():
    made = Federation.from_table(many(), client="who", label="y")
    run = ft.run(ft.FedAvg(lr=0.1, steps=2), made, rounds=2, seed=0)
    assert 0 <= run.summary["acc_personal"] <= 1


def test_a_federation_of_arrays_does_not_import_pandas():
    code = "import sys, numpy as np, fedtailor as ft; p = [(np.ones((2, 2)), [0, 1])]; ft.Federation.from_arrays(p, p); "
    subprocess.run([sys.executable, "-c", code + "assert 'pandas' not in sys.modules"], check=True)


# -- folders -----------------------------------------------------------------------------------------------------------


def write_clients(root: Path, frame: pd.DataFrame) -> None:
    for name, mine in frame.groupby("who"):
        mine.drop(columns="who").to_csv(root / f"{name}.csv", index=False)


def test_a_folder_of_tables_is_the_table_with_a_client_column(tmp_path):
    frame = many()
    write_clients(tmp_path, frame)
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "README.md").write_text("x")
    made = Federation.from_folder(tmp_path, label="y", seed=4)
    expected = Federation.from_table(frame, client="who", label="y", seed=4)
    assert made.names == expected.names
    assert torch.equal(made.train.y, expected.train.y)
    torch.testing.assert_close(made.train.x, expected.train.x)
    assert made.recipe == {"data": str(tmp_path), "label": "y", "seed": 4}
    assert made.name == tmp_path.name
    assert said(made, "ignored", "'README.md'")


def test_a_folder_per_client_with_files_by_part(tmp_path):
    for who, part in (("NA", "train"), ("NA", "test"), ("b", "train"), ("b", "test")):
        (tmp_path / who).mkdir(exist_ok=True)
        frame = pd.DataFrame({"y": [0, 1] * 3, "x": np.arange(6.0) + (10 if part == "test" else 0)})
        frame.to_csv(tmp_path / who / f"{part}.csv", index=False)
    made = Federation.from_folder(tmp_path, label="y", standardize="none")
    assert made.names == ("NA", "b")
    assert made.val is None
    assert made.train.x[:, 0].tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert made.test.x[:, 0].tolist() == [10, 11, 12, 13, 14, 15] * 2


def test_a_folder_per_client_with_several_tables(tmp_path):
    for who in "ab":
        (tmp_path / who).mkdir()
        for month in ("may", "june"):
            pd.DataFrame({"y": [0, 1] * 5, "x": range(10)}).to_parquet(tmp_path / who / f"{month}.parquet")
    assert len(Federation.from_folder(tmp_path, label="y").train.y) == 24  # 60 % of 40


def test_a_column_may_be_empty_or_of_another_type_in_one_file(tmp_path):
    pd.DataFrame({"y": [0, 1] * 5, "n": [None] * 10, "w": range(10)}).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame({"y": [0, 1] * 5, "n": np.arange(10), "w": ["u", "v"] * 5}).to_csv(tmp_path / "b.csv", index=False)
    made = Federation.from_folder(tmp_path, label="y")
    assert [column.kind for column in made.schema.columns] == ["numeric", "category"]


def test_arrays_per_client(tmp_path):
    x, y = np.arange(24.0).reshape(12, 2), np.array([0, 1] * 6)
    for who in "ab":
        np.savez(tmp_path / f"{who}.npz", x=x, y=y)
    made = Federation.from_folder(tmp_path)
    assert made.names == ("a", "b")
    assert made.classes == ("0", "1")
    rows = torch.cat([part.client(1)[0] for part in (made.train, made.test, made.val)])
    assert sorted(rows[:, 0].tolist()) == x[:, 0].tolist()
    assert made.schema is None


def test_arrays_with_given_parts(tmp_path):
    for who in "ab":
        np.savez(tmp_path / f"{who}.npz", x_train=np.eye(4), y_train=[0.5, 1, 2, 3], x_test=np.ones((1, 4)), y_test=[7.25])
    made = Federation.from_folder(tmp_path)
    assert made.kind == "regression"
    assert made.train.y.tolist() == [0.5, 1, 2, 3] * 2
    assert made.test.y.tolist() == [7.25] * 2


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.ones((4, 2))}, ["lacks 'y'"]),
        ({"z": np.ones(2)}, ["lacks 'x_train'"]),
        ({"x": np.ones(4), "y": np.zeros(4)}, ["shape (4,)"]),
        ({"x": np.ones((4, 2)), "y": np.zeros(3)}, ["4 rows"]),
        ({"x": np.ones((4, 3)), "y": np.zeros(4)}, ["(3,)", "(2,)"]),
        ({"x": np.ones((0, 2)), "y": np.zeros(0)}, ["no rows"]),
        ({"x": np.full((4, 2), np.nan), "y": np.array([0, 1, 0, 1])}, ["client 'b'"]),
        ({"x": np.array([[object()]]), "y": np.zeros(1)}, ["cannot be read"]),
        ({"x_train": np.ones((4, 2)), "y_train": [0] * 4, "x_test": np.ones((4, 2)), "y_test": [1] * 4}, ["split"]),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_file(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2)), y=np.array([0, 1, 0, 1]))
    np.savez(tmp_path / "b.npz", **arrays)
    with refused(errors.InvalidData, *words):
        Federation.from_folder(tmp_path)


def write_images(root: Path, mode: str = "L", size: tuple[int, int] = (3, 2)) -> None:
    for who in "ab":
        for kind, value in (("cat", 0), ("dog", 255)):
            (root / who / kind).mkdir(parents=True, exist_ok=True)
            for i in range(4):
                Image.new(mode, size, value if mode == "L" else (value, 0, 51)).save(root / who / kind / f"{i}.png")


def test_images_by_client_and_class(tmp_path):
    write_images(tmp_path)
    made = Federation.from_folder(tmp_path)
    assert made.classes == ("cat", "dog")
    assert made.train.x.shape[1:] == (1, 2, 3)  # channels, height, width
    assert made.train.x.dtype == torch.float32
    for x, y in zip(made.train.x, made.train.y, strict=True):
        assert torch.equal(x, torch.full((1, 2, 3), float(y)))  # a cat is black, a dog is white


def test_images_in_colour_and_resized(tmp_path):
    write_images(tmp_path, "RGB")
    made = Federation.from_folder(tmp_path, image_size=(4, 5))
    assert made.train.x.shape[1:] == (3, 4, 5)
    assert torch.equal(made.train.x[:, 2], torch.full((len(made.train.y), 4, 5), 51 / 255))


def test_one_image_in_colour_makes_all_of_them_so(tmp_path):
    write_images(tmp_path)
    Image.new("RGB", (3, 2), (255, 0, 0)).save(tmp_path / "a" / "cat" / "0.png")
    assert Federation.from_folder(tmp_path).train.x.shape[1:] == (3, 2, 3)


def test_images_that_do_not_fit_are_refused_by_file(tmp_path):
    write_images(tmp_path)
    Image.new("L", (9, 9)).save(tmp_path / "b" / "dog" / "3.png")
    with refused(errors.InvalidData, "'dog/3.png' has 9x9", "image_size="):
        Federation.from_folder(tmp_path)
    (tmp_path / "b" / "dog" / "3.png").write_bytes(b"junk")
    with refused(errors.InvalidData, "'dog/3.png'", "replace"):
        Federation.from_folder(tmp_path)
    with refused(errors.InvalidArgument, "image_size=0"):
        Federation.from_folder(tmp_path, image_size=0)


def test_a_folder_without_data_is_refused_with_the_layouts(tmp_path):
    for name in ("empty", "notes", "both", "bare"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    (tmp_path / "both" / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "both" / "sub").mkdir()
    (tmp_path / "bare" / "sub").mkdir()
    for name, words in (("empty", "no data"), ("notes", "no data"), ("both", "tables and folders"), ("bare", "'sub'")):
        with refused(errors.InvalidData, words, "one .csv", ".npz", "images per class"):
            Federation.from_folder(tmp_path / name, label="y")
    with refused(errors.InvalidArgument, "no folder"):
        Federation.from_folder(tmp_path / "none", label="y")
    with refused(errors.InvalidArgument, "is a file", "from_table"):
        Federation.from_folder(tmp_path / "notes" / "a.txt", label="y")


def test_tables_of_clients_that_do_not_fit_are_refused_by_file(tmp_path):
    write_clients(tmp_path, many())
    with refused(errors.InvalidArgument, "label"):
        Federation.from_folder(tmp_path)
    first = pd.read_csv(tmp_path / "site 0.csv")
    first.drop(columns="ward").to_csv(tmp_path / "site 2.csv", index=False)
    with refused(errors.InvalidData, "site 2.csv", "'ward'"):
        Federation.from_folder(tmp_path, label="y")
    first.assign(new=1).to_csv(tmp_path / "site 2.csv", index=False)
    with refused(errors.InvalidData, "site 2.csv", "'new'"):
        Federation.from_folder(tmp_path, label="y")
    first.assign(dose=["1"] * 2 + ["low"] + ["2"] * (len(first) - 3)).to_csv(tmp_path / "site 2.csv", index=False)
    with refused(errors.InvalidData, "'dose'", "row 3 of", "site 2.csv", "'low'"):
        Federation.from_folder(tmp_path, label="y")


def test_files_by_part_must_be_so_for_all(tmp_path):
    for who in "ab":
        (tmp_path / who).mkdir()
    table = "x,y\n" + "1,0\n2,1\n" * 5
    for path in ("a/train.csv", "a/test.csv", "b/all.csv"):
        (tmp_path / path).write_text(table)
    with refused(errors.InvalidData, "client 'b'"):
        Federation.from_folder(tmp_path, label="y")
    (tmp_path / "b" / "train.csv").write_text(table)
    with refused(errors.InvalidData, "'all.csv'", "'b'"):
        Federation.from_folder(tmp_path, label="y")
    (tmp_path / "b" / "all.csv").rename(tmp_path / "b" / "test.csv")
    with refused(errors.InvalidArgument, "split='x'"):
        Federation.from_folder(tmp_path, label="y", split="x")
    assert len(Federation.from_folder(tmp_path, label="y").test.y) == 20


@pytest.mark.parametrize("count", [99_999, 100_000, 100_001])
@pytest.mark.parametrize("law", ["smooth", "tied", "lopsided", "sorted"])
def test_the_median_of_many_values_is_numpys(count, law):
    draw = np.random.default_rng(count)
    values = draw.normal(size=count)
    values = {
        "smooth": values,
        "tied": np.round(values),
        "lopsided": np.where(np.arange(count) % (count // 4096) == 0, 100.0, values),  # the sample is of other rows than the rest
        "sorted": np.sort(values),
    }[law]
    assert median(values) == np.median(values)
