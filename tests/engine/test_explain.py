"""Which columns a model rests on: against the closed form of a linear model, and where clients differ from the shared one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedtailor as ft
from fedtailor.engine.explain import explain, in_words, interval
from fedtailor.runs import models
from tests.cli.test_cli import answer, done, refusal


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


LAWS = ([2.0, 1.0, 0.0], [2.0, -1.0, 0.0])


def linear_run(method, **options):
    draw = np.random.default_rng(0)
    pairs = []
    for law in LAWS:
        x = draw.normal(size=(80, 3)) * [1, 1, 3]
        pairs.append((x, x @ law + 0.3 * draw.normal(size=80)))
    fed = ft.Federation.from_arrays(pairs, pairs)
    run = ft.run(method, fed, dtype="float64", bias=False, rounds=40, evaluate_every=0, out="run", **options)
    return run, models.read(Path("run"))


def test_importance_is_that_of_a_deal_at_random():
    """Of half the squared error, on average over all deals: w^2 Var(x) - w Cov(x, error)."""
    run, saved = linear_run(ft.Local(lr=0.05, steps=20))
    explained = explain(saved, run.federation, deals=2000)
    for i, entry in enumerate(explained["clients"]):
        x, y = (part.numpy() for part in run.federation.test.client(i))
        w = saved.weights(str(i))["weight"][0].numpy()
        error = x @ w - y
        by_name = {column["column"]: column for column in entry["columns"]}
        for j in range(3):
            expected = w[j] ** 2 * x[:, j].var() - w[j] * np.mean((x[:, j] - x[:, j].mean()) * error)
            column = by_name[f"feature {j}"]
            assert column["importance"] == pytest.approx(expected, rel=0.03, abs=2e-3)
            assert column["low"] <= column["importance"] <= column["high"]
            assert column["coefficients"] == {f"feature {j}": pytest.approx(w[j])}
            assert "differs" not in column  # there is no shared model
        assert [column["column"] for column in entry["columns"]][:2] == ["feature 0", "feature 1"]


def test_the_column_in_which_clients_have_another_law_is_named():
    run, saved = linear_run(ft.Ditto(lam=0.01, lr=0.05, steps=20))
    for entry in explain(saved, run.federation)["clients"]:
        assert {column["column"]: column["differs"] for column in entry["columns"]} == {
            "feature 0": False,
            "feature 1": True,  # the shared model has nearly nothing of it
            "feature 2": False,
        }
    with pytest.raises(ft.errors.InvalidArgument, match="deals=0"):
        explain(saved, run.federation, deals=0)


def test_an_interval_is_students():
    from scipy import stats

    values = np.array([1.0, 2.0, 4.0, 4.5])
    expected = stats.t.interval(0.95, 3, values.mean(), stats.sem(values))
    assert interval(values) == pytest.approx(expected)
    assert interval(values[:1]) == (None, None)


def test_the_command_writes_words_numbers_and_a_picture():
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"who": np.repeat(list("AB"), 80), "<x>": draw.normal(size=160), "z": draw.choice(["u", "v"], 160)})
    frame["y"] = np.where(frame["<x>"] > 0, "ill", "well")
    frame.to_csv("t.csv", index=False)
    done("run", "ditto", "t.csv", "--client", "who", "--label", "y", "--rounds", "20", "--lr", "0.5", "--out", "r")
    before = answer("verify", "r")
    said = done("explain", "r").stdout
    assert said.startswith("By how much the loss on test rows grows")
    assert "A (20 test rows) rests on <x> " in said
    page = Path("r/explain.html").read_text()
    assert page.count("<svg") == 2
    assert "&lt;x&gt;" in page
    assert "<x>" not in page
    record = answer("explain", "r", "--client", "B")
    assert [entry["client"] for entry in record["clients"]] == ["B"]
    (first, second) = record["clients"][0]["columns"]
    assert (first["column"], list(second["coefficients"])) == ("<x>", ["z=u", "z=v"])
    assert first["low"] > 0
    assert answer("verify", "r") == before
    assert "no client 'C'" in refusal("explain", "r", "--client", "C")
    done("run", "fedavg", "digits", "--clients", "2", "--with", "images=true", "--rounds", "1", "--out", "p")
    assert "explain is for rows of" in refusal("explain", "p")
    assert json.loads(Path("r/summary.json").read_text())["algorithm"] == "Ditto"


def test_what_rounds_to_nothing_has_no_sign():
    column = {"column": "age", "importance": -0.0001, "low": -0.02, "high": 0.0002}
    lines = in_words({"clients": [{"client": "a", "rows": 9, "columns": [column]}]})
    assert lines == ["a (9 test rows) surely rests on no column, most on age 0.000 (-0.020 to 0.000)."]


def test_a_model_is_said_to_rest_on_columns_whose_interval_leaves_out_zero():
    columns = [
        {"column": "dose", "importance": 0.3, "low": -0.1, "high": 0.7},
        {"column": "age", "importance": 0.2, "low": 0.1, "high": 0.3},
        {"column": "sex", "importance": 0.1, "low": None, "high": None},  # one row, which has no interval
    ]
    lines = in_words({"clients": [{"client": "a", "rows": 9, "columns": columns}]})
    assert lines == ["a (9 test rows) rests on age 0.200 (0.100 to 0.300); sex 0.100."]
