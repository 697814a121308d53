"""Weights of rows as a column of a table: a weight of 2 is the row twice, measures count all rows alike."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli import app


@pytest.fixture
def table():
    draw = np.random.default_rng(0)
    rows = 120
    x = draw.normal(size=rows)
    part = np.tile(["train", "train", "train", "val", "test"], rows // 5)
    y = (x + draw.normal(size=rows) > 0).astype(int)
    frame = pd.DataFrame({"site": np.repeat(["a", "b"], rows // 2), "x": x, "part": part, "times": draw.integers(0, 4, rows)})
    return frame.assign(y=np.where(y, "ill", "well"))


def options(**more):
    return {"client": "site", "label": "y", "split": "part", "standardize": "none", **more}


def test_a_weighted_row_is_the_row_so_many_times(table):
    weighted = ft.Federation.from_table(table, **options(row_weights="times"))
    times = np.where(table["part"] == "train", table["times"], 1)
    copies = ft.Federation.from_table(table.loc[table.index.repeat(times)].drop(columns="times"), **options())
    assert weighted.train.x.shape[1] == copies.train.x.shape[1] == 1
    runs = [ft.run(ft.FedAvg(lr=0.5, steps=3), fed, rounds=5, dtype="float64") for fed in (weighted, copies)]
    for name in runs[0].shared["model"]:
        np.testing.assert_allclose(runs[0].shared["model"][name], runs[1].shared["model"][name], atol=1e-12)
    assert runs[0].summary["loss_personal"] == pytest.approx(runs[1].summary["loss_personal"], abs=1e-12)


@pytest.mark.parametrize(("value", "word"), [(-1, "'-1' in row 1"), (np.nan, "nothing in row 1"), (np.inf, "'inf' in row 1")])
def test_a_wrong_weight_is_refused_by_its_row(table, value, word):
    table["times"] = table["times"].astype(float)
    table.loc[0, "times"] = value
    with pytest.raises(ft.errors.InvalidData, match=word):
        ft.Federation.from_table(table, **options(row_weights="times"))


def test_a_column_is_not_weight_and_label_at_once(table):
    with pytest.raises(ft.errors.InvalidArgument, match="'y' is named as label and weights"):
        ft.Federation.from_table(table, **options(row_weights="y"))
    with pytest.raises(ft.errors.InvalidArgument, match="did you mean 'times'"):
        ft.Federation.from_table(table, **options(row_weights="time"))


def test_the_command_line_takes_the_column_and_goes_on_with_it(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table.drop(columns="part").to_csv("t.csv", index=False)
    words = ["compare", "t.csv", "--client", "site", "--label", "y", "--row-weights", "times", "--splits", "3-fold"]
    words += ["--methods", "local,fedavg", "--rounds", "2", "--out", "out"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert "count as 'times' says" in done.stderr
    values = json.loads(done.stdout)
    assert values["verdict"]["splits"] == 3
    again = CliRunner().invoke(app, ["resume", "out", "--json"])
    assert json.loads(again.stdout)["verdict"] == values["verdict"]
    refused = CliRunner().invoke(app, [*words[:-1], "other", "--splits", "1-fold"])
    assert refused.exit_code == 2
    assert "every row tests once" in refused.stderr


def test_tuning_weighs_rows_as_copies_would(table):
    weighted = ft.Federation.from_table(table, **options(row_weights="times"))
    times = np.where(table["part"] == "train", table["times"], 1)
    copies = ft.Federation.from_table(table.loc[table.index.repeat(times)].drop(columns="times"), **options())
    plain = ft.Federation.from_table(table.drop(columns="times"), **options())
    stories = [
        ft.compare(
            [ft.Ditto(steps=3)], fed, tune={"lr": [0.1, 0.5], "lam": [0.1, 1.0]}, rounds=4, dtype="float64", yardsticks=["none"]
        ).tuning["Ditto"]
        for fed in (weighted, copies, plain)
    ]
    losses = [{str((t["settings"], t["rounds"])): t["loss"] for t in story["trials"]} for story in stories]
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)
    assert losses[0] != pytest.approx(losses[2], abs=1e-4)
    assert stories[0]["chosen"] == stories[1]["chosen"]


@pytest.mark.parametrize("command", ["advise", "sweep"])
def test_what_counts_all_rows_alike_refuses_weights_and_says_what_does_not(table, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    table.to_csv("t.csv", index=False)
    words = [command, "t.csv", "--client", "site", "--label", "y", "--split", "part", "--row-weights", "times"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "these rows have weights; use compare --tune, which weighs them" in refused.stderr.replace("\n", " ")
    assert CliRunner().invoke(app, [*words[:-2], "--drop", "times", "--rounds", "2"]).exit_code == 0
