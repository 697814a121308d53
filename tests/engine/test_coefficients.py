"""Intervals of coefficients: against the closed form of least squares, and how often they hold the truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedtailor as ft
from fedtailor.engine.coefficients import intervals, sandwich
from fedtailor.engine.explain import explain
from fedtailor.runs import models
from tests.cli.test_cli import answer, done


def squares(seed, rows, noise=1.0, width=3):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, width))
    return x, x @ np.arange(1.0, width + 1) + noise * draw.normal(size=rows)


def test_of_least_squares_it_is_the_sandwich_in_closed_form():
    x, y = squares(0, 40)
    fit = np.linalg.lstsq(x, y, rcond=None)[0]
    bread = np.linalg.inv(x.T @ x)
    middle = sum((y[i] - x[i] @ fit) ** 2 * np.outer(x[i], x[i]) for i in range(40))
    covariance, freedom = sandwich(fit[None], x, y, np.ones(40), False)
    np.testing.assert_allclose(covariance, bread @ middle @ bread * 40 / 37, rtol=1e-9)
    assert freedom == 37


def test_with_many_rows_it_is_the_textbooks_error():
    """Where noise is the same in all rows: s^2 (X'X)^-1."""
    x, y = squares(1, 40_000, noise=2.0)
    fit = np.linalg.lstsq(x, y, rcond=None)[0]
    covariance, _ = sandwich(fit[None], x, y, np.ones(len(y)), False)
    np.testing.assert_allclose(np.diag(covariance), np.diag(4.0 * np.linalg.inv(x.T @ x)), rtol=0.05)


def test_a_weight_of_two_is_the_row_twice_and_too_few_rows_have_none():
    x, y = squares(2, 12)
    fit = np.linalg.lstsq(x, y, rcond=None)[0][None]
    twice, _ = sandwich(fit, x, y, np.full(12, 2.0), False)
    np.testing.assert_allclose(twice, sandwich(fit, x, y, np.ones(12), False)[0])  # counting all rows twice tells nothing new
    assert sandwich(fit, x[:3], y[:3], np.ones(3), False) is None


def test_all_categories_of_a_column_have_the_interval_of_the_smallest_fit():
    """A constant and both of two categories: the smallest fit has half the difference of the means in each category."""
    draw = np.random.default_rng(3)
    side = np.repeat([0, 1], 30)
    y = side + draw.normal(size=60)
    x = np.column_stack([side == 0, side == 1, np.ones(60)]).astype(float)
    fit = np.linalg.pinv(x) @ y
    covariance, freedom = sandwich(fit[None], x, y, np.ones(60), False)
    variances = [y[side == k].var() / 30 * 60 / 58 for k in (0, 1)]
    contrast = np.array([-1.0, 1.0, 0.0])
    assert contrast @ covariance @ contrast == pytest.approx(sum(variances))
    assert freedom == 58


def test_of_two_classes_it_is_that_of_the_log_odds(tmp_path):
    draw = np.random.default_rng(4)
    x = draw.normal(size=(300, 2))
    y = (x[:, 0] + draw.logistic(size=300) > 0).astype(int)
    fed = ft.Federation.from_arrays([(x, y)] * 2, [(x, y)] * 2)
    ft.run(ft.Local(lr=1.0, steps=50), fed, dtype="float64", rounds=20, out=tmp_path / "run")
    saved = models.read(tmp_path / "run")
    found = intervals(saved, fed, "0")
    own = saved.weights("0")
    beta = np.append(own["weight"][1] - own["weight"][0], own["bias"][1] - own["bias"][0])
    rows = np.column_stack([x, np.ones(300)])
    p = 1 / (1 + np.exp(-rows @ beta))
    bread = np.linalg.inv((rows * (p * (1 - p))[:, None]).T @ rows)
    middle = (rows * ((p - y) ** 2)[:, None]).T @ rows
    errors = np.sqrt(np.diag(bread @ middle @ bread) * 300 / 297) * stats.t.ppf(0.975, 297)
    for i in range(2):
        np.testing.assert_allclose(found[i], [beta[i] - errors[i], beta[i] + errors[i]], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("uneven", [False, True])
def test_nineteen_of_twenty_intervals_hold_the_truth(uneven):
    """2000 draws of 60 rows: 95 % within four deviations and a point for the sandwich on few rows, also where noise is uneven."""
    held, truth = [], np.array([1.0, 2.0, 3.0])
    for seed in range(2000):
        x, y = squares(seed, 60, noise=0.0)
        noise = np.random.default_rng(10**6 + seed).normal(size=60)
        y = y + noise * (0.5 + np.abs(x[:, 0]) if uneven else 1.0)
        fit = np.linalg.lstsq(x, y, rcond=None)[0]
        covariance, freedom = sandwich(fit[None], x, y, np.ones(60), False)
        held.append(np.abs(fit - truth) <= stats.t.ppf(0.975, freedom) * np.sqrt(np.diag(covariance)))
    assert np.all(np.abs(np.mean(held, 0) - 0.95) < (0.04 if uneven else 0.03))


def test_the_report_of_a_run_says_what_its_models_rest_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"who": np.repeat(list("AB"), 80), "<x>": draw.normal(size=160), "z": draw.normal(size=160)})
    frame["y"] = np.where(frame["<x>"] + draw.logistic(size=160) / 4 > 0, "well", "ill")
    frame.to_csv("t.csv", index=False)
    done("run", "ditto", "t.csv", "--client", "who", "--label", "y", "--rounds", "20", "--lr", "0.5", "--out", "r")
    first = Path("r/report.html").read_text()
    assert "What the models rest on" in first
    assert "own (95 % interval)" in first
    assert "&lt;x&gt;" in first
    done("report", "r", "--to", "again.html")
    assert first.split("What the models rest on")[1].split("<h2>")[0] in Path("again.html").read_text()
    explained = answer("explain", "r", "--client", "A")["clients"][0]["columns"]
    by_name = {column["column"]: column for column in explained}
    low, high = by_name["<x>"]["coefficient_intervals"]["<x>"]
    assert 0 < low < by_name["<x>"]["coefficients"]["<x>"] < high
    assert by_name["z"]["shared_coefficient_intervals"]["z"][0] < 0 < by_name["z"]["shared_coefficient_intervals"]["z"][1]
    Path("t.csv").unlink()
    assert "not shown" in done("report", "r", "--to", "without.html").stderr


def test_clients_of_one_shared_model_have_its_intervals(tmp_path):
    pairs = [squares(seed, 30) for seed in range(3)]
    fed = ft.Federation.from_arrays(pairs, pairs)
    run = ft.run(ft.FedAvg(lr=0.3), fed, dtype="float64", bias=False, rounds=50, out=tmp_path / "run")
    entries = explain(models.read(tmp_path / "run"), run.federation)["clients"]
    for entry in entries:
        for column in entry["columns"]:
            assert column["coefficient_intervals"] == column["shared_coefficient_intervals"]
