"""What is odd about a table is found, with its number; what is not odd is left alone."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fedtailor import Federation
from fedtailor.data import describe as d
from fedtailor.data.checks import findings


def table(rows: int = 600, seed: int = 0) -> pd.DataFrame:
    """Three clients alike, a label of two classes that depends a little on x, nothing odd."""
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame({"who": [f"site {i % 3}" for i in range(rows)], "x": draw.normal(50, 10, rows)})
    frame["w"] = draw.choice(["u", "v", "z"], rows)
    frame["k"] = draw.integers(0, 9, rows)
    frame["y"] = np.where(frame["x"] + draw.normal(0, 10, rows) > 50, "ill", "well")
    return frame


def found(frame: pd.DataFrame, **options) -> list:
    return findings(Federation.from_table(frame, client="who", label="y", **options))


def of(what: str, frame: pd.DataFrame, **options) -> list:
    return [finding for finding in found(frame, **options) if finding.what == what]


def test_nothing_is_said_of_a_plain_table():
    assert found(table()) == []
    assert found(table().assign(y=lambda t: t["x"] * 2.5 + np.random.default_rng(1).normal(0, 20, len(t)))) == []


@pytest.mark.parametrize("standardize", ["pooled", "client"])
def test_a_column_that_is_the_label_or_nearly_so_is_found(standardize):
    frame = table()
    ill = (frame["y"] == "ill").to_numpy()
    flips = np.random.default_rng(2).random(len(frame)) < 0.01
    frame["code"] = np.where(ill, "K35", "none")
    frame["score"] = np.where(ill ^ flips, 7.0, 3.0) + np.random.default_rng(3).random(len(frame))
    leaks = of("leak", frame, standardize=standardize)
    assert [leak.column for leak in leaks] == ["code", "score"]
    assert leaks[0].evidence == 1.0
    assert 0.95 < leaks[1].evidence < 1
    assert "100.0 % of the test rows" in leaks[0].sentence
    assert "--drop" in leaks[0].sentence


def test_a_column_that_is_the_quantity_in_other_units_is_found():
    frame = table().assign(y=lambda t: t["x"] * 2.5 + np.random.default_rng(1).normal(0, 20, len(t)))
    frame["in euro"] = frame["y"] * 0.91 + 3
    leaks = of("leak", frame)
    assert [leak.column for leak in leaks] == ["in euro"]
    assert leaks[0].evidence > 0.999


def test_copies_of_a_column_are_found():
    frame = table()
    frame["x in mm"] = frame["x"] * -10
    frame["ward"] = frame["w"].map({"u": "A", "v": "B", "z": "C"})
    assert [(copy.column, "'x'" in copy.sentence or "'w'" in copy.sentence) for copy in of("copy", frame)] == [
        ("x in mm", True),
        ("ward", True),
    ]


def keys(column, frame: pd.DataFrame) -> list[str]:
    """What is said of the whole numbers of a column that is added to a table."""
    made = Federation.from_table(frame.assign(patient=column), client="who", label="y")
    assert not any("'k'" in note and "whole numbers" in note for note in made.notes)
    return [note for note in made.notes if "Column 'patient'" in note]


def test_numbers_that_name_rows_or_people_are_pointed_out_with_their_count():
    frame, draw = table(), np.random.default_rng(0)
    numbered = draw.permutation(600) + 10_000
    assert "holds 600 different whole numbers in 600 rows; if it only names" in keys(numbered, frame)[0]
    twice = draw.permutation(np.concatenate([np.arange(400), np.arange(200)])) + 10_000  # some people came twice
    assert "holds 400 different whole numbers in 600 rows" in keys(twice, frame)[0]
    sparse = draw.choice(10**8, 600, replace=False)
    sparse[:20] = sparse[20:40]
    assert "holds 580 different whole numbers in 600 rows" in keys(sparse, frame)[0]
    unknown = sparse.astype(float)
    unknown[40:50] = np.nan  # of which nobody had another's
    assert "holds 570 different" in keys(unknown, frame)[0]


def test_measurements_in_whole_numbers_are_left_alone():
    frame, draw = table(), np.random.default_rng(0)
    for measured in (draw.normal(250, 50, 600).round(), draw.integers(0, 3_000, 600), draw.normal(size=600)):
        assert keys(measured, frame) == []


def test_clients_that_are_tiny_or_have_one_class_are_named():
    frame = table()
    frame.loc[:8, "who"] = "hamlet"
    frame.loc[9:80, "who"] = "clinic"
    frame.loc[9:80, "y"] = "ill"
    (tiny,), (single,) = of("tiny client", frame), of("one class", frame)
    assert "'hamlet' (3)" in tiny.sentence
    assert tiny.evidence == 1
    assert single.sentence == "1 client has one class only in the training rows: 'clinic'."


def test_a_rare_class_is_pointed_out_with_what_guessing_gives():
    frame = table(1500)
    frame["y"] = np.where(np.arange(1500) % 77 == 0, "ill", "well")
    (found_rare,) = of("imbalance", frame)
    assert "'ill' is 1.3 %" in found_rare.sentence
    assert "98.7 %" in found_rare.sentence
    assert "AUC" in found_rare.sentence


def test_of_many_classes_none_of_which_prevails_accuracy_is_not_said_to_be_high():
    frame = table(900)
    frame["y"] = np.where(np.arange(900) % 50 == 0, "rare", np.where(np.arange(900) % 2, "one", "other"))
    (found_rare,) = of("imbalance", frame)
    assert "'rare' is 2.0 %" in found_rare.sentence
    assert "accuracy hardly shows whether it is found" in found_rare.sentence


def test_outliers_are_found_in_their_units():
    frame = table()
    frame["part"] = np.where(np.arange(600) % 4 == 3, "test", "train")
    frame.loc[[4, 8], "x"] = [5000.0, 4000.0]
    (outlier,) = of("outlier", frame, split="part")
    assert outlier.column == "x"
    assert "2 far outliers, as 5000" in outlier.sentence


def test_a_slip_of_the_pen_in_a_row_that_tests_is_an_outlier_too():
    frame = table()
    frame["part"] = np.select([np.arange(600) % 4 == 3, np.arange(600) % 8 == 2], ["test", "val"], "train")
    frame.loc[3, "x"], frame.loc[2, "k"] = 5000.0, 999
    assert [(o.column, o.sentence.split(";")[0]) for o in of("outlier", frame, split="part")] == [
        ("x", "'x' has 1 far outlier, as 5000"),
        ("k", "'k' has 1 far outlier, as 999"),
    ]


def test_rows_that_are_in_training_and_test_are_counted():
    frame = table()
    frame["part"] = np.where(np.arange(600) % 4 == 3, "test", "train")
    frame.loc[[3, 7, 11]] = frame.loc[[0, 1, 2]].assign(part="test").to_numpy()
    (repeated,) = of("repeated rows", frame, split="part")
    assert "3 of 150 test rows (2.0 %)" in repeated.sentence


def test_a_column_that_differs_between_clients_is_found_with_its_means():
    frame = table()
    frame.loc[frame["who"] == "site 2", "k"] += 40
    (shift,) = of("shift", frame)
    assert shift.column == "k"
    assert shift.evidence > 0.9
    assert "at 'site 2'" in shift.sentence
    assert "44" in shift.sentence


@pytest.mark.parametrize("standardize", ["pooled", "client"])
def test_a_client_with_one_number_in_all_rows_or_none_is_named(standardize):
    frame = table()
    frame["chol"] = np.where(frame["who"] == "site 1", 0.0, np.random.default_rng(1).normal(250, 40, len(frame)).round())
    frame["thal"] = np.where(frame["who"] == "site 2", np.nan, np.random.default_rng(2).normal(5, 1, len(frame)))
    (single,) = of("one value", frame, standardize=standardize)
    assert single.column == "chol"
    assert "'chol' is one and the same in all training rows of 'site 1' (0)" in single.sentence
    (absent,) = of("absent", frame, standardize=standardize)
    assert absent.sentence == "'thal' is missing in nearly all training rows of 'site 2' (100 %)."
    (shift,) = (finding for finding in of("shift", frame, standardize=standardize) if finding.column == "chol")
    assert "its mean is 0 at 'site 1'" in shift.sentence


def test_findings_stand_in_the_terminal_and_on_the_page():
    frame = table()
    frame["code"] = frame["y"]
    about = d.describe(Federation.from_table(frame, client="who", label="y"))
    assert about["findings"][0]["column"] == "code"
    assert "! 'code' alone" in d.terminal(about).plain
    page = d.html(about)
    assert "Worth a look" in page
    assert "&#x27;code&#x27; alone" in page


def test_the_page_is_sorted_and_has_an_axis():
    frame = pd.concat([table(), table(300, 1).assign(who="huge"), table(300, 2).assign(who="huge")])
    page = d.html(d.describe(Federation.from_table(frame, client="who", label="y")))
    names = [part.split("<")[0] for part in page.split('text-anchor="end">')[1:]]
    assert names[0] == "huge"
    assert ">rows</text>" in page
    assert ">600</text>" in page
    frame["y"] = np.arange(len(frame)) * 0.5
    page = d.html(d.describe(Federation.from_table(frame, client="who", label="y")))
    assert ">target</text>" in page
