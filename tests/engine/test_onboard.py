"""A client that comes after the run: its model by the run's own method, and an honest word on whether it is better."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import fedtailor as ft
from fedtailor.errors import FedtailorError
from fedtailor.runs import models
from tests.cli.test_cli import answer, done, refusal

COLUMNS = ("--client", "who", "--label", "y")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def numbers(seed: int, rows: int, weight) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 3))
    return x, x @ np.asarray(weight) + 0.1 * draw.normal(size=rows)


@pytest.fixture
def kept(tmp_path):
    """A run on three clients with nearly the same law, to which a newcomer with another one comes."""
    pairs = [numbers(i, 40, [1, -1, 0.5]) for i in range(3)]
    fed = ft.Federation.from_arrays(pairs, pairs)

    def run(method, **options):
        return ft.run(method, fed, dtype="float64", bias=False, rounds=60, out=tmp_path / "run", **options)

    return lambda method, **options: (run(method, **options), models.read(tmp_path / "run"))


def test_the_newcomer_reaches_the_minimiser_of_its_risk_and_the_pull_to_the_shared_model(kept):
    run, saved = kept(ft.Ditto(lam=0.7, lr=0.3, steps=2))
    x, y = numbers(9, 30, [3, 1, 0])
    new = ft.onboard(saved, x, y, "new")
    shared = run.shared["model"]["weight"][0].numpy()
    expected = np.linalg.solve(x.T @ x / 30 + 0.7 * np.eye(3), x.T @ y / 30 + 0.7 * shared)
    rows = torch.eye(3, dtype=torch.float64)
    got = saved.algorithm.predict(saved.task, saved.shared, new.personal, rows)[:, 0].numpy()
    np.testing.assert_allclose(got, expected, atol=1e-8)
    assert new.record["verdict"]["outcome"] == "helps"
    assert 0 < new.record["low"] < new.record["gain"] < new.record["high"]


def test_errors_are_those_of_rows_that_were_not_trained_on(kept):
    """By hand, with the ridge solution of each fold, found from the rows that each fold's model predicts best."""
    _, saved = kept(ft.Ditto(lam=0.7, lr=0.3, steps=2))
    x, y = numbers(9, 10, [3, 1, 0])  # ten rows in ten folds: leaving one out
    shared = saved.shared["model"]["weight"][0].numpy()
    errors = []
    for i in range(10):
        rest = np.arange(10) != i
        fit = np.linalg.solve(x[rest].T @ x[rest] / 9 + 0.7 * np.eye(3), x[rest].T @ y[rest] / 9 + 0.7 * shared)
        errors.append((x[i] @ fit - y[i]) ** 2)
    record = ft.onboard(saved, x, y, "new").record
    assert record["personal"] == pytest.approx(np.mean(errors), abs=1e-6)
    assert record["shared"] == pytest.approx(np.mean((x @ shared - y) ** 2), abs=1e-6)


def test_a_newcomer_like_the_others_is_not_said_to_be_better_off(kept):
    _, saved = kept(ft.Ditto(lam=0.1, lr=0.3, steps=2))
    verdicts = {ft.onboard(saved, *numbers(seed, 12, [1, -1, 0.5]), "new").record["verdict"]["outcome"] for seed in range(20, 23)}
    assert "helps" not in verdicts


def test_where_there_is_nothing_to_compare_it_is_said(kept):
    _, saved = kept(ft.FedAvg(lr=0.3))
    x, y = numbers(9, 30, [3, 1, 0])
    new = ft.onboard(saved, x, y, "new")
    assert new.record["verdict"]["outcome"] == "not known"
    assert "gives every client the shared model" in new.record["text"]
    assert new.record["gain"] is None
    assert ft.onboard(saved, x[:9], y[:9], "new").record["folds"] == 0
    with pytest.raises(FedtailorError, match="has a model of '0'"):
        ft.onboard(saved, x, y, "0")
    with pytest.raises(FedtailorError, match=r"shape \(2,\)"):
        ft.onboard(saved, x[:, :2], y, "new")
    private = replace(saved, algorithm=replace(saved.algorithm, opt=ft.Private(clip=1.0, noise=1.0)))
    with pytest.raises(FedtailorError, match="is private"):
        ft.onboard(private, x, y, "new")


def test_alone_the_newcomer_fits_its_own_rows(kept):
    _, saved = kept(ft.Local(lr=0.3))
    x, y = numbers(9, 30, [3, 1, 0])
    new = ft.onboard(saved, x, y, "new", rounds=300)
    assert "nothing to compare" in new.record["verdict"]["sentence"]
    np.testing.assert_allclose(new.personal["model"]["weight"][0].numpy(), np.linalg.lstsq(x, y, rcond=None)[0], atol=1e-6)


def table(name: str, rows: int, seed: int, flip: bool = False) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame({"who": name, "x": draw.normal(5, 2, rows).round(3), "z": draw.choice(["a", "b"], rows)})
    frame["y"] = np.where((frame["x"] > 5) != flip, "ill", "well")
    return frame


@pytest.mark.parametrize("scale", ["pooled", "client"])
def test_onboard_writes_a_model_that_predict_knows(scale):
    pd.concat([table(name, 40, i) for i, name in enumerate("ABC")]).to_csv("old.csv", index=False)
    new = table("D", 60, 7, flip=True)
    new["x"] += 100.0  # another unit: only its own scale makes sense of it
    new.to_csv("new.csv", index=False)
    flags = ("--rounds", "20", "--lr", "1", "--lam", "0.01", "--standardize", scale, "--out", "r")
    done("run", "fedclup", "old.csv", *COLUMNS, *flags)
    before = answer("verify", "r")
    record = answer("onboard", "r", "new.csv")
    if scale == "client":
        assert record["verdict"]["outcome"] == "helps"
        assert record["personal"] > 0.9
    assert {key: record[key] for key in ("client", "rows", "folds")} == {"client": "D", "rows": 60, "folds": 10}
    assert answer("verify", "r") == before
    rows = pd.DataFrame(answer("predict", "r", "new.csv", "--client", "D"))
    assert set(rows["model used"]) == {"D"}
    if scale == "client":
        assert (rows["prediction"] == rows["y"]).mean() > 0.9
    assert pd.DataFrame(answer("predict", "r", "new.csv")).equals(rows)
    again = done("onboard", "r", "new.csv", "--rounds", "1").stdout  # with more rows, or another setting
    assert "fedtailor predict r NEW.csv --client D" in again
    assert "has a model of 'A'" in refusal("onboard", "r", "old.csv", "--client", "A")


def test_what_cannot_be_onboarded_is_refused_by_name(tmp_path):
    pd.concat([table(name, 40, i) for i, name in enumerate("ABC")]).to_csv("old.csv", index=False)
    done("run", "ditto", "old.csv", *COLUMNS, "--rounds", "2", "--out", "r")
    new = table("D", 12, 7)
    new.drop(columns="who").to_csv("nameless.csv", index=False)
    assert "give --client NAME" in refusal("onboard", "r", "nameless.csv")
    pd.concat([new, table("E", 12, 8)]).to_csv("two.csv", index=False)
    assert "'D', 'E'; say with --client NAME" in refusal("onboard", "r", "two.csv")
    assert answer("onboard", "r", "two.csv", "--client", "E")["rows"] == 12
    new.assign(y="dead").to_csv("other.csv", index=False)
    assert "is 'dead' in row 1, no class of the run ('ill', 'well')" in refusal("onboard", "r", "other.csv")
    new.drop(columns="y").to_csv("unlabelled.csv", index=False)
    assert "no label column 'y'" in refusal("onboard", "r", "unlabelled.csv")
    new.loc[:3, "y"] = ""
    new.to_csv("half.csv", index=False)
    result = done("onboard", "r", "half.csv")
    assert "4 rows without a label were left out" in result.stderr
    assert "8 rows are too few to tell" in result.stdout
    facts = next((tmp_path / "r" / "onboarded").glob("*.json"))
    changed = json.loads(facts.read_text())
    changed["moments"] = [[0.0, 2.0]]
    facts.write_text(json.dumps(changed))
    assert "was changed" in refusal("predict", "r", "old.csv")
