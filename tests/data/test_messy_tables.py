"""Tables as hospitals have them: leading zeros, words for missing, commas and dates in every style; nothing is lost unsaid."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedtailor as ft
from fedtailor import Federation, errors
from fedtailor.data.tables.alike import folded
from tests.data.test_tables import feature, read, said, small
from tests.package.test_bad_input import refused


def written(path: Path, columns: dict[str, list[object]], rows: int = 12) -> Path:
    """A table as a file, its cells as they stand, each list repeated to ``rows``."""
    repeated = {name: (values * rows)[:rows] for name, values in columns.items()}
    lines = [",".join(map(str, cells)) for cells in zip(*repeated.values(), strict=True)]
    path.write_text("\n".join([",".join(repeated), *lines]) + "\n")
    return path


# -- clients and labels as written -------------------------------------------------------------------------------------


def codes(tmp_path: Path) -> Path:
    return written(
        tmp_path / "t.csv", {"who": ["0071", "071", "71", "007"], "y": [0, 1, 1, 0, 1], "x": [1, 2, 3, 4, 5, 6, 7]}, 40
    )


def test_clients_with_leading_zeros_are_kept_apart_as_written(tmp_path):
    made = Federation.from_table(codes(tmp_path), client="who", label="y")
    assert set(made.names) == {"0071", "071", "71", "007"}
    assert said(made, "Clients that look alike are kept apart", "'0071' (10), '071' (10), '71' (10)", "--merge-clients")
    assert not said(made, "look alike", "'007' (")


def test_clients_that_look_alike_are_merged_if_asked_and_it_is_said(tmp_path):
    made = Federation.from_table(codes(tmp_path), client="who", label="y", merge_clients=True)
    assert set(made.names) == {"0071", "007"}
    assert sum(len(part.client(made.index("0071"))[1]) for part in (made.train, made.test, made.val)) == 30
    assert said(made, "were merged", "'0071' (10), '071' (10), '71' (10)")


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("ill", " ILL ", True),
        ("01", "1", True),
        ("1.0", "1", True),
        ("+7", "007", True),
        ("-1", "1", False),
        ("Zürich", unicodedata.normalize("NFD", "ZÜRICH"), True),
        ("North  Ward", "north ward", True),
        ("100", "10", False),
        ("0", "00", True),
        ("a1", "a01", False),
        (str(2**60), str(2**60 + 1), False),
    ],
)
def test_names_look_alike_by_case_spaces_accents_and_zeros(one, other, alike):
    assert (folded(one) == folded(other)) is alike


def test_labels_that_look_alike_are_listed_and_merged_if_asked(tmp_path):
    labels = ["ill", " ILL ", "well", "ill", "well", "well", "ill"]
    path = written(tmp_path / "t.csv", {"who": ["a", "b"], "y": labels, "x": [1, 2, 3]}, 56)
    made = Federation.from_table(path, client="who", label="y")
    assert set(made.classes) == {"ill", " ILL ", "well"}
    assert said(made, "Labels that look alike are kept apart", "'ill' (24), ' ILL ' (8)", "--merge-labels")
    merged = Federation.from_table(path, client="who", label="y", merge_labels=True)
    assert merged.classes == ("ill", "well")
    assert said(merged, "Labels", "were merged", "'ill' (24), ' ILL ' (8)")


def test_classes_written_as_numbers_keep_their_digits(tmp_path):
    path = written(tmp_path / "t.csv", {"who": ["a", "b"], "y": ["01", "02", "01", "02", "10"], "x": [1, 2, 3]}, 60)
    assert Federation.from_table(path, client="who", label="y").classes == ("01", "02", "10")


def test_labels_with_decimals_are_quantities(tmp_path):
    path = written(tmp_path / "t.csv", {"who": ["a", "b"], "y": [0.5, 1.25, 7, 3], "x": [1, 2, 3]}, 24)
    made = Federation.from_table(path, client="who", label="y")
    assert made.kind == "regression"
    assert set(torch.cat([made.train.y, made.test.y, made.val.y]).tolist()) == {0.5, 1.25, 7.0, 3.0}


def test_quantities_are_read_although_only_later_rows_have_decimals(tmp_path):
    labels = [*range(2_000), 0.5]  # the first thousand rows show none
    path = written(tmp_path / "t.csv", {"who": ["a", "b"], "y": labels, "x": [1, 2, 3]}, 2_001)
    made = Federation.from_table(path, client="who", label="y")
    assert made.kind == "regression"
    assert float(min(part.y.min() for part in (made.train, made.test, made.val))) == 0.0


# -- missing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_frame", [False, True])
def test_a_class_and_a_hospital_called_NA_lose_no_row(tmp_path, as_frame):
    path = written(tmp_path / "t.csv", {"who": ["NA", "b", "null"], "y": ["None", "NA", "ill", "None"], "x": [1, 2, 3, 4, 5]}, 60)
    source = pd.read_csv(path, keep_default_na=False) if as_frame else path
    made = Federation.from_table(source, client="who", label="y")
    assert made.names == ("NA", "b", "null")
    assert made.classes == ("NA", "None", "ill")
    assert len(made.train.y) + len(made.test.y) + len(made.val.y) == 60
    assert not said(made, "Taken for missing")


@pytest.mark.parametrize("as_frame", [False, True])
def test_the_words_taken_for_missing_are_named_with_counts(tmp_path, as_frame):
    columns = {"who": ["a", "b"], "y": [0, 1, 1], "n": [1.5, "NA", 2.5, "null"], "w": ["u", "v", "N/A"], "x": [1, 2, 3, 4, 5]}
    path = written(tmp_path / "t.csv", columns, 60)
    made = Federation.from_table(pd.read_csv(path, keep_default_na=False) if as_frame else path, client="who", label="y")
    assert made.schema.names() == ["n", "n missing", "w=missing", "w=u", "w=v", "x"]
    assert said(made, "Taken for missing: ", "'N/A' (20)", "'NA' (15)", "'null' (15)", "'n', 'w'", "--keep-na")
    kept = Federation.from_table(path, client="who", label="y", keep_na=True, features=["w"])
    assert kept.schema.names() == ["w=N/A", "w=u", "w=v"]


def test_a_column_that_is_not_used_is_not_named(tmp_path):
    path = written(tmp_path / "t.csv", {"who": ["a", "b"], "y": [0, 1, 1], "n": [1.5, "NA"], "x": [1, 2, 3, 4, 5]}, 60)
    assert not said(Federation.from_table(path, client="who", label="y", drop=["n"]), "Taken for missing")


def test_a_mark_of_missing_values_can_be_added(tmp_path):
    columns = {"who": ["a", "b"], "y": [0, 1, "?", 1], "age": [50, " ?", 60, 61, 62], "k": [-99, 1, 2, 3, 4, 5, 6]}
    path = written(tmp_path / "t.csv", columns, 120)
    with refused(errors.InvalidData, "'age'", "row 2", "--na ' ?'"):
        Federation.from_table(path, client="who", label="y", task="classification")
    made = Federation.from_table(path, client="who", label="y", na=["?", "-99"])
    assert made.schema.names() == ["age", "age missing", "k", "k missing"]
    assert made.classes == ("0", "1")
    assert said(made, "'?' (54)", "'-99' (18)")  # 24 ages and 30 labels
    assert said(made, "30 rows without a label were left out")
    again = made.schema.encode(pd.DataFrame({"age": ["?", "60"], "k": [-99, 1]}))
    assert again[:, 1].tolist() == [1, 0]
    assert again[:, 3].tolist() == [1, 0]


def test_a_word_that_was_kept_is_kept_in_new_rows():
    schema = read(small(w=["NA", "u", "u", "NA", "u", "v"]), keep_na=True).schema
    assert schema.names() == ["x", "w=NA", "w=u"]
    assert schema.encode(pd.DataFrame({"x": [1, 1], "w": ["NA", None]}))[:, 1].tolist() == [1, 0]


# -- numbers and dates, however written --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "values", "words"),
    [
        (["1,5", "2", "-3,25", "0,5", "1.000,5", "7"], [1.5, 2, -3.25, 0.5, 1000.5, 7], "'1,5' is 1.5"),
        (["1,000", "2,500", "10", "999", "1,234,567", "7.5"], [1000, 2500, 10, 999, 1234567, 7.5], "'1,000' is 1000"),
        (["12%", "3 %", "0.5%", "100%", "7%", "8%"], [12, 3, 0.5, 100, 7, 8], "'12%' is 12"),
        (["12,5%", "3%", "0,5%", "100%", "7%", "8%"], [12.5, 3, 0.5, 100, 7, 8], "'12,5%' is 12.5"),
        (["1 000", "2\u00a0000", "3", "4", "5", "6"], [1000, 2000, 3, 4, 5, 6], "thousands"),
    ],
)
def test_numbers_are_read_however_they_are_written(cells, values, words):
    made = read(small(n=cells))
    train, test = feature(made, "n")
    assert [*train[:2], test[0], *train[2:], test[1]] == values
    assert said(made, "In 'n'", words)
    again = made.schema.encode(pd.DataFrame({"x": [0.0] * 6, "n": cells}))[:, 1]
    assert again.tolist() == values


def test_thousands_that_may_be_decimals_are_pointed_out():
    assert said(read(small(n=["1,000", "2,500", "1,200", "4,000", "5,125", "6,000"])), "'1,000' is 1000", "Another reading")
    assert not said(read(small(n=["1,000", "2,500", "1,200.5", "4,000", "5,125", "6,000"])), "Another reading")


@pytest.mark.parametrize(
    ("cells", "days", "words"),
    [
        (
            ["01/02/2020", "02/02/2020", "31/01/2020", "03/02/2020", "1/3/2020", "2/2/2020 12:00"],
            [0, 1, -1, 2, 29, 1.5],
            "day first",
        ),
        (["02/01/2020", "02/02/2020", "01/31/2020", "02/03/2020", "3/1/2020", "2/2/2020"], [0, 1, -1, 2, 29, 1], "month first"),
        (["1.2.2020", "2.2.2020", "31.1.2020", "3.2.2020", "1.3.2020", "2.2.2020"], [0, 1, -1, 2, 29, 1], "day first"),
        (["2020/2/1", "2020/2/2", "2020/1/31", "2020/2/3", "2020/3/1", "2020/2/2"], [0, 1, -1, 2, 29, 1], "'2020/12/31'"),
    ],
)
def test_dates_are_read_however_they_are_written(cells, days, words):
    made = read(small(d=cells))
    train, test = feature(made, "d")
    assert [*train[:2], test[0], *train[2:], test[1]] == days
    assert said(made, "In 'd'", words)
    assert not said(made, "Another reading")
    assert made.schema.encode(pd.DataFrame({"x": [0.0] * 6, "d": cells}))[:, 1].tolist() == days


def test_dates_whose_day_may_be_the_month_are_pointed_out():
    assert said(read(small(d=["01/02/2020", "02/02/2020", "03/02/2020"] * 2)), "day first", "Another reading")


def test_dates_that_fit_no_order_are_refused_by_row():
    with refused(errors.InvalidData, "'d'", "dates", "'12/31/2020' in row 6"):
        read(small(d=["31/01/2020", "30/01/2020", "29/01/2020", "28/01/2020", "27/01/2020", "12/31/2020"]))


def test_new_rows_in_another_style_are_refused_with_the_style():
    schema = read(small(n=["1,5", "2,5", "3,5", "4,5", "5,5", "6,5"])).schema
    with refused(errors.InvalidData, "row 1", "'12%'", "'1,5' is 1.5"):
        schema.encode(pd.DataFrame({"x": [0.0], "n": ["12%"]}))


# -- names with commas -------------------------------------------------------------------------------------------------


def test_a_column_whose_name_has_commas_can_be_dropped_and_chosen():
    frame = small(**{"age, years": [1, 2, 3, 4, 5, 7], "k": [1, 3, 2, 4, 5, 6]})
    assert read(frame, drop=["x", "age", "years"]).schema.names() == ["k"]  # as the command line cuts it
    assert read(frame, drop=["age, years"]).schema.names() == ["x", "k"]
    assert read(frame, features=["k", "age", "years"]).schema.names() == ["k", "age, years"]
    with refused(errors.InvalidArgument, "no column to drop 'years'"):
        read(frame, drop=["years"])


# -- DataFrames to predict ---------------------------------------------------------------------------------------------


def test_a_run_predicts_rows_of_a_data_frame():
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"who": ["a", "b"] * 40, "x": draw.normal(size=80), "w": draw.choice(["u", "v"], 80)})
    frame["y"] = np.where(frame["x"] + draw.normal(size=80) > 0, "ill", "well")
    made = Federation.from_table(frame, client="who", label="y", standardize="client")
    run = ft.run(ft.FedAvg(lr=0.1), made, rounds=2, seed=0)
    new = frame.iloc[[5, 3, 8]]
    logits = run.predict("b", new)
    assert torch.equal(logits, run.predict("b", made.schema.encode(new, "b")))
    table = run.predict("b", new, as_frame=True)
    assert list(table.index) == [5, 3, 8]
    assert list(table.columns) == ["prediction", "probability ill", "probability well"]
    np.testing.assert_allclose(table.iloc[:, 1:].to_numpy(float), torch.softmax(logits.double(), -1).numpy(), rtol=1e-6)
    assert torch.equal(run.predict_global(new), run.predict_global(made.schema.encode(new)))


def test_a_data_frame_of_quantities_is_in_their_units():
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"who": ["a", "b"] * 40, "x": draw.normal(size=80)})
    frame["y"] = 1000 + 50 * frame["x"] + draw.normal(size=80)
    made = Federation.from_table(frame, client="who", label="y", standardize_label=True)
    run = ft.run(ft.FedAvg(lr=0.1), made, rounds=2, seed=0)
    predicted = run.predict("a", frame, as_frame=True)["prediction"].to_numpy(float)
    np.testing.assert_allclose(predicted, made.schema.restore(run.predict("a", frame).double().numpy()))
    assert 900 < predicted.mean() < 1100


def test_a_data_frame_means_nothing_to_a_federation_of_arrays():
    pairs = [(np.eye(2), [0, 1])] * 2
    run = ft.run(ft.FedAvg(lr=0.1), Federation.from_arrays(pairs, pairs), rounds=1, seed=0)
    with refused(errors.ModelMismatch, "came from no table", "give an array"):
        run.predict(0, pd.DataFrame({"a": [1.0], "b": [2.0]}))
