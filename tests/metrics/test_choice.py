"""One rule for which of several is best, and one verdict on a newcomer's model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedtailor as ft
from fedtailor.advisor.pilot import Race, task_and_rows
from fedtailor.engine.options import Options
from fedtailor.metrics.paired import Runs, over_rows, paired
from fedtailor.metrics.verdict import Candidate, best_first, judge, judge_newcomer, signed
from fedtailor.report.evidence import Evidence
from fedtailor.report.words import chosen
from fedtailor.runs import folder, models
from fedtailor.task.scores import ACCURACY

ROWS = np.full(8, 50.0)


def test_a_clearly_better_score_wins_and_the_loss_chooses_where_it_is_not_clear():
    draw = np.random.default_rng(0)
    level = 0.7 + 0.01 * draw.normal(size=8)
    better = Candidate(level + 0.1 + 0.001 * draw.normal(size=8), ROWS, 0.9)
    near = Candidate(better.scores + 0.02 * np.tile([1.0, -1.0], 4) - 1e-4, ROWS, 0.5)
    worse = Candidate(level, ROWS, 0.1)  # by its loss alone it would win
    assert best_first([worse, better, near], ACCURACY) == [2, 1, 0]
    assert best_first([worse, better], ACCURACY) == [1, 0]


def test_a_client_with_one_row_does_not_choose_the_method():
    rows = np.array([200.0, 200.0, 200.0, 1.0])
    steady = Candidate(np.array([0.82, 0.81, 0.83, 0.0]), rows, 0.4)
    lucky = Candidate(np.array([0.79, 0.78, 0.80, 1.0]), rows, 0.4)  # better by the plain mean, 0.84 to 0.62
    assert best_first([lucky, steady], ACCURACY) == [1, 0]


def hospitals(seed, clients=8, rows=60):
    """A table whose clients' laws lie about one centre."""
    draw, parts = np.random.default_rng(seed), []
    for client in range(clients):
        x, w = draw.normal(size=(rows, 4)), [1, -1, 0.5, 0] + 0.7 * draw.normal(size=4)
        ill = draw.random(rows) < 1 / (1 + np.exp(-x @ w))
        parts.append(pd.DataFrame(x, columns=list("abcd")).assign(client=f"c{client}", label=np.where(ill, "ill", "well")))
    return ft.Federation.from_table(pd.concat(parts, ignore_index=True), client="client", label="label")


def contenders():
    work = {"lr": 0.3, "steps": 5}
    return [ft.Local(**work), ft.FedAvg(**work), ft.Ditto(lam=0.3, **work), ft.FedAvgFT(finetune_steps=5, **work)]


@pytest.mark.parametrize("seed", [1, 4, 7])  # of each the best mean on validation is another method's
def test_a_comparison_and_the_race_of_an_advice_rank_the_same_methods_alike(seed, tmp_path):
    fed, options = hospitals(seed), Options.of({"rounds": 5, "evaluate_every": 0})
    evidence = Evidence(ft.compare(contenders(), fed, rounds=5, evaluate_every=0, yardsticks=(), out=tmp_path / "c").records())
    race = Race(*task_and_rows(fed, "linear", options), options)
    for algorithm in contenders():
        label = type(algorithm).__name__
        race.enter(label, algorithm)
        race.go(label, 5)
    assert evidence.order == [entrant.label for entrant in race.standing()]
    assert evidence.best != evidence.highest == max(evidence.validation, key=evidence.validation.get)
    assert f"within a standard error of that of {evidence.highest}, and its loss is lower" in chosen(evidence)
    assert Evidence(folder.read(tmp_path / "c")).order == evidence.order  # from disk as live


def test_a_comparison_of_an_earlier_version_goes_by_the_mean():
    records = ft.compare(contenders(), hospitals(1), rounds=5, evaluate_every=0, yardsticks=()).records()

    def without(record):
        return replace(record, clients={key: v for key, v in record.clients.items() if not key.startswith("val_")})

    evidence = Evidence({label: [without(record) for record in each] for label, each in records.items()})
    assert evidence.best == evidence.highest != Evidence(records).best


def test_splits_of_the_rows_count_in_what_is_a_standard_error():
    level, zigzag = np.full((3, 8), 0.7), 0.1 * np.array([[1.0], [-1.0], [0.5]])
    first, second = Candidate(level + 0.01 + zigzag, np.tile(ROWS, (3, 1)), 0.9), Candidate(level, np.tile(ROWS, (3, 1)), 0.5)
    assert best_first([first, second], ACCURACY) == [0, 1]  # clients agree in their means
    by_split = [candidate._replace(runs=Runs([0, 1, 2], 0.25)) for candidate in (first, second)]
    assert best_first(by_split, ACCURACY) == [1, 0]  # rows do not: the loss chooses


def test_a_gain_says_how_clients_count_and_what_the_plain_mean_is():
    rows = np.array([200.0, 200.0, 200.0, 200.0, 200.0, 2.0, 2.0])
    ours, theirs = np.full(7, 0.8), np.array([0.7, 0.7, 0.7, 0.7, 0.7, 1.0, 1.0])
    gains = paired(ACCURACY, ours, theirs, rows)
    assert gains.mean == pytest.approx((5 * 0.1 * 200 - 2 * 0.2 * 2) / (5 * 200 + 2 * 2))
    assert gains.plain == pytest.approx((5 * 0.1 - 2 * 0.2) / 7)
    verdict = judge("Ditto", gains, ACCURACY)
    assert "clients with few rows count less, the plain mean is +0.0143" in verdict.sentence
    assert verdict.json()["plain_gain"] == gains.plain
    alike = judge("Ditto", paired(ACCURACY, ours, theirs, np.full(7, 50.0)), ACCURACY)
    assert "plain mean" not in alike.sentence
    assert alike.plain_gain == alike.gain == pytest.approx(gains.plain)


def test_rounding_has_no_sign():
    assert [signed(value, 1.0) for value in (-1e-17, 0.0, 0.01, -0.01)] == ["0.0000", "0.0000", "+0.0100", "\u22120.0100"]


def test_rows_are_paired_by_students_law():
    draw = np.random.default_rng(1)
    own, shared = (draw.random((2, 40)) < [[0.9], [0.6]]).astype(float)
    gains = over_rows(ACCURACY, own, shared)
    expected = stats.ttest_rel(own, shared)
    low, high = expected.confidence_interval(0.95)
    assert (gains.low, gains.high, gains.p) == pytest.approx((low, high, expected.pvalue))
    verdict = judge_newcomer("Oslo", gains, ACCURACY, (own.mean(), shared.mean()))
    assert verdict.outcome == "helps"
    assert "over 40 rows" in verdict.sentence


def test_a_newcomer_is_judged_by_the_score_of_the_run(tmp_path):
    draw = np.random.default_rng(2)

    def rows(sign, count):
        x = draw.normal(size=(count, 2))
        return x, (sign * x[:, 0] + 0.3 * draw.normal(size=count) > 0).astype(int)

    old = [rows(1, 60) for _ in range(3)]
    fed = ft.Federation.from_arrays(old, old)
    ft.run(ft.Ditto(lam=0.01, lr=0.5, steps=5), fed, rounds=10, score="auc", out=tmp_path / "run")
    record = ft.onboard(models.read(tmp_path / "run"), *rows(-1, 60), "new").record
    assert record["score"] == record["verdict"]["score"] == "auc"
    assert record["verdict"]["outcome"] == "helps"
    assert record["personal"] > 0.9 > 0.1 > record["shared"]
    assert record["text"] == record["verdict"]["sentence"]


def test_advise_and_sweep_say_that_nothing_else_was_tuned_and_a_sweep_speaks_of_one_lam():
    fed = ft.Federation.load("digits", clients=6, partition="dirichlet:0.3")
    advice, swept = ft.advise(fed, rounds=10), ft.sweep(fed, rounds=4, lams=3, dynamic=False)
    assert advice.verdict.tuned is swept.verdict.tuned is False
    assert "untuned" in advice.verdict.sentence
    assert "nothing else was tuned" in swept.verdict.sentence
    assert swept.verdict.method == f"FedCLUP lam={swept.best:.3g}"
    assert f"lam={swept.best:g}" in swept.text.splitlines()[2]
