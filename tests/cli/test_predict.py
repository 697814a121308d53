"""``predict`` on tables as they are: clients as written, rows by their numbers in the file, flags for what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedtailor as ft
from fedtailor.data.schema import Schema
from tests.cli.test_cli import answer, done, refusal

COLUMNS = ("--client", "who", "--label", "y")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def coded(rows: int = 40) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"who": [("0101", "101", "7")[i % 3] for i in range(rows)], "x": draw.normal(size=rows).round(3)})
    frame["y"] = np.where(frame["x"] + draw.normal(size=rows) > 0, "ill", "well")
    return frame


def test_a_client_with_leading_zeros_is_found_by_name_and_by_row():
    coded().to_csv("t.csv", index=False)
    done("run", "fedavgft", "t.csv", *COLUMNS, "--rounds", "2", "--out", "mine")
    rows = pd.DataFrame(answer("predict", "mine", "t.csv"))
    assert list(rows["who"]) == list(coded()["who"])
    for name in ("0101", "101"):
        own = pd.DataFrame(answer("predict", "mine", "t.csv", "--client", name))
        mine = (rows["who"] == name).to_numpy()
        np.testing.assert_array_equal(own["probability ill"][mine], rows["probability ill"][mine])
    stranger = coded().assign(who="00101")
    stranger.to_csv("new.csv", index=False)
    said = done("predict", "mine", "new.csv", "--json").stderr
    assert "no model of 00101 (which looks like the client 0101); the shared model" in said


def test_merged_clients_are_found_by_any_of_their_spellings():
    coded().to_csv("t.csv", index=False)
    done("run", "fedavgft", "t.csv", *COLUMNS, "--rounds", "2", "--out", "mine", "--merge-clients")
    coded().assign(who="00101").to_csv("new.csv", index=False)
    result = done("predict", "mine", "new.csv", "--json")
    assert "'00101' is taken for the client '0101'" in result.stderr
    own = answer("predict", "mine", "new.csv", "--client", "0101")
    assert json.loads(result.stdout) == own


def test_a_schema_of_the_first_version_takes_look_alikes_for_one():
    """It read 0101 as the number 101."""
    frame = pd.DataFrame({"who": [101, 7] * 12, "x": np.arange(24) % 5, "y": [0, 1, 1] * 8})
    data = ft.Federation.from_table(frame, client="who", label="y").schema.to_json()
    for later in ("marks", "public", "merged_clients"):
        data.pop(later)
    for column in data["columns"]:
        column.pop("style")
    old = Schema.from_json(data)
    assert old.merged_clients
    assert old.encode(pd.DataFrame({"x": ["NA", "2"]})).shape == (2, 1)


def test_a_row_that_cannot_be_read_is_named_by_its_number_in_the_file():
    coded().to_csv("t.csv", index=False)
    done("run", "fedavg", "t.csv", *COLUMNS, "--rounds", "1", "--out", "mine")
    lines = Path("t.csv").read_text().splitlines()
    lines[12] = lines[12].replace(lines[12].split(",")[1], "tall")  # the twelfth row, the fourth of its client
    Path("bad.csv").write_text("\n".join(lines))
    assert "row 12 holds 'tall'" in refusal("predict", "mine", "bad.csv")
    lines[12] = ",1.0,ill"
    Path("whose.csv").write_text("\n".join(lines))
    assert "row 12 names no client in 'who'" in refusal("predict", "mine", "whose.csv")


def test_a_column_with_a_comma_in_its_name_is_dropped_and_marks_are_added():
    frame = coded().assign(**{"age, years": 5, "k": [*range(3), "?"] * 10})
    frame["age, years"] = np.arange(40) % 9
    frame.to_csv("t.csv", index=False)
    assert "--na '?'" in refusal("data", "describe", "t.csv", *COLUMNS)
    about = answer("data", "describe", "t.csv", *COLUMNS, "--drop", "age, years", "--na", "?")
    assert about["shape"] == [3]  # x, k, and whether k is missing
    assert any("'?' (10)" in note for note in about["notes"])


def test_columns_are_saved_and_given_back():
    coded().assign(age=np.arange(40) % 9).to_csv("t.csv", index=False)
    done("data", "describe", "t.csv", *COLUMNS, "--save-columns", "columns.toml")
    done("run", "fedavg", "t.csv", *COLUMNS, "--columns", "columns.toml", "--rounds", "1", "--out", "mine")
    summary = json.loads(Path("mine/summary.json").read_text())
    assert any("nothing was learnt from the rows" in note for note in summary["notes"])
    assert json.loads(Path("mine/models/models.json").read_text())["schema"]["public"]
    done("resume", "mine")
    assert len(answer("predict", "mine", "t.csv")) == 40
    assert "columns" in refusal("data", "describe", "digits", "--columns", "columns.toml")


def test_every_row_says_whose_model_predicted_it():
    coded().to_csv("t.csv", index=False)
    done("run", "fedavgft", "t.csv", *COLUMNS, "--rounds", "1", "--out", "mine")
    coded().replace({"who": {"7": "new"}}).to_csv("new.csv", index=False)
    rows = pd.DataFrame(answer("predict", "mine", "new.csv"))
    assert list(rows["model used"]) == ["shared" if name == "new" else name for name in rows["who"]]
    rows = pd.DataFrame(answer("predict", "mine", "new.csv", "--client", "7"))
    assert set(rows["model used"]) == {"7"}


def test_a_new_client_is_predicted_by_another_method_where_the_best_has_no_shared_model():
    coded().to_csv("t.csv", index=False)
    done("compare", "t.csv", *COLUMNS, "--methods", "local,fedavg", "--rounds", "1", "--out", "both")
    coded().replace({"who": {"7": "new"}}).to_csv("new.csv", index=False)
    result = done("predict", "both", "new.csv", "--method", "local", "--json")
    assert "no model of new; the shared model of FedAvg predicts their rows" in result.stderr
    rows = pd.DataFrame(json.loads(result.stdout))
    assert set(rows["model used"]) == {"0101", "101", "shared (FedAvg)"}
    shared = pd.DataFrame(answer("predict", "both", "new.csv", "--method", "fedavg"))
    strangers = (rows["who"] == "new").to_numpy()
    np.testing.assert_array_equal(rows["probability ill"][strangers], shared["probability ill"][strangers])


def far_apart(scale=1.0):
    """Three hospitals whose patients differ in x by far more than within one, and whose rules are opposite."""
    draw = np.random.default_rng(0)
    x = np.concatenate([draw.normal(10.0 * i, 1.0, 30) for i in range(3)])
    side = np.concatenate([draw.normal(size=30) for _ in range(3)])
    y = np.where(side * np.repeat([1, -1, 1], 30) > 0, "ill", "well")
    return pd.DataFrame({"who": np.repeat(["low", "middle", "high"], 30), "x": scale * x, "side": side, "y": y})


@pytest.mark.parametrize("more", [(), ("--standardize", "client"), ("--standardize", "none")], ids=str)
def test_where_there_is_no_shared_model_at_all_a_new_client_has_the_nearest_clients_model(more):
    far_apart().to_csv("t.csv", index=False)
    done("run", "local", "t.csv", *COLUMNS, "--rounds", "3", "--lr", "0.01", "--out", "alone", *more)
    new = pd.DataFrame({"who": ["a", "b", "a"], "x": [11.5, 19.0, 8.5], "side": [1.0, 1.0, -1.0], "y": "ill"})
    new.to_csv("new.csv", index=False)
    result = done("predict", "alone", "new.csv", "--json")
    assert "Local has no shared one, so the model of the client whose rows are most like theirs predicts" in result.stderr
    rows = pd.DataFrame(json.loads(result.stdout))
    assert list(rows["model used"]) == ["middle (nearest client)", "high (nearest client)", "middle (nearest client)"]
    middle = pd.DataFrame(answer("predict", "alone", "new.csv", "--client", "middle"))
    np.testing.assert_array_equal(rows["probability ill"][[0, 2]], middle["probability ill"][[0, 2]])
    assert "no client 'new'" in refusal("predict", "alone", "new.csv", "--client", "new")


def test_a_run_that_does_not_know_its_clients_rows_gives_the_mean_of_their_predictions(monkeypatch):
    monkeypatch.setattr("fedtailor.runs.models._middles", lambda *_: {})  # as an earlier version, or a private run
    coded().to_csv("t.csv", index=False)
    done("run", "local", "t.csv", *COLUMNS, "--rounds", "3", "--out", "alone")
    coded().replace({"who": {"7": "new"}}).to_csv("new.csv", index=False)
    rows = pd.DataFrame(answer("predict", "alone", "new.csv"))
    strangers = (rows["who"] == "new").to_numpy()
    assert set(rows["model used"]) == {"0101", "101", "mean of 3 clients"}
    each = [pd.DataFrame(answer("predict", "alone", "new.csv", "--client", name)) for name in ("0101", "101", "7")]
    mean = np.mean([own["probability ill"][strangers] for own in each], 0)
    np.testing.assert_allclose(rows["probability ill"][strangers], mean, atol=1e-6)


@pytest.mark.parametrize("more", [(), ("--new-clients", "0.3"), ("--standardize", "client", "--data-seed", "5")], ids=str)
def test_held_out_rows_are_those_that_the_summary_is_about(tmp_path, more):
    coded(120).to_csv("t.csv", index=False)
    done("run", "ditto", "t.csv", *COLUMNS, "--rounds", "3", "--out", "mine", *more)
    rows = pd.DataFrame(answer("predict", "mine", "--held-out"))
    summary = json.loads(Path("mine/summary.json").read_text())
    right = (rows["prediction"] == rows["y"]).groupby(rows["who"]).mean()
    count = summary.get("new_clients", 0)
    parts = summary["acc_personal"] * (3 - count) + summary.get("new_acc_personal", 0) * count
    assert right.sum() == pytest.approx(parts)
    assert len(rows) == pytest.approx(30, abs=3)
    Path("t.csv").rename("moved.csv")
    assert "is not there any more" in refusal("predict", "mine", "--held-out")
    assert pd.DataFrame(answer("predict", "mine", "moved.csv", "--held-out")).equals(rows)
    coded(121).to_csv("other.csv", index=False)
    assert "is not the table that the run was made with" in refusal("predict", "mine", "other.csv", "--held-out")
    assert "which rows?" in refusal("predict", "mine")


def test_held_out_rows_are_those_of_the_split_column_also_in_a_comparison():
    frame = coded(60).assign(part=(["train"] * 3 + ["test", "val"]) * 12, id=[f"row {i} of mine" for i in range(60)])
    frame.to_csv("t.csv", index=False)
    done("compare", "t.csv", *COLUMNS, "--split", "part", "--methods", "local,fedavg", "--rounds", "1", "--out", "both")
    rows = pd.DataFrame(answer("predict", "both", "--held-out"))
    assert list(rows["id"]) == list(frame.loc[frame["part"] == "test", "id"])
    done("run", "fedavg", "digits", "--clients", "3", "--rounds", "1", "--out", "pictures")
    assert "--held-out is for runs on a table" in refusal("predict", "pictures", "--held-out")
