"""Advice: clear cases come out as theory says, test rows are never looked at, bad input is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.advisor.look import look, pull, pulls
from fedtailor.advisor.pilot import Budget, Entrant, Race, ranked, with_validation
from fedtailor.cli import app
from fedtailor.data.split import Split
from fedtailor.engine.options import Options
from fedtailor.engine.setup import build_task
from fedtailor.report.advice import page as write
from fedtailor.task.kinds import REGRESSION
from fedtailor.task.scores import ACCURACY
from fedtailor.theory.heterogeneity import Heterogeneity


def federation(scatter, m=12, n=40, d=4, kind="regression", seed=0):
    """Clients about one centre, with ``scatter`` per coordinate."""
    draw = np.random.default_rng(seed)
    truth = draw.normal(size=d) + scatter * draw.normal(size=(m, d))

    def rows(w, count):
        x = draw.normal(size=(count, d))
        return x, x @ w + draw.normal(size=count) if kind == "regression" else (draw.random(count) < 1 / (1 + np.exp(-x @ w))) * 1

    return ft.Federation.from_arrays(*([rows(w, count) for w in truth] for count in (n, 200, 20)), task=kind)


def test_clients_who_are_alike_are_told_to_learn_together():
    advice = ft.advise(federation(0.0))
    assert advice.collaborate
    assert advice.heterogeneity.zero
    assert np.isinf(advice.theory_lam)
    assert "not distinguishable from zero" in advice.text
    assert advice.regime in ("shared", "between")


def test_clients_who_are_far_apart_are_hardly_pulled_together():
    fed = federation(10.0)
    advice = ft.advise(fed)
    low, high = advice.r2_interval
    assert low < advice.r2 < high
    assert advice.lam < 0.1  # the fits have noise 4/40, the truths a scatter of 400
    best = min(
        ft.run(a, fed, rounds=50).summary["mse_personal"] for a in (ft.Local(lr=0.3, steps=10), ft.FedAvg(lr=0.3, steps=10))
    )
    assert ft.run(advice.algorithm, fed, rounds=50).summary["mse_personal"] < 1.02 * best


def test_the_advice_can_be_run_and_beats_both_ends_in_between():
    fed = federation(0.3, m=30, n=15, seed=1)
    advice = ft.advise(fed, rounds=30)
    assert advice.regime == "between"
    tried = (advice.algorithm, ft.Local(lr=0.2, steps=10), ft.FedAvg(lr=0.2, steps=10))
    mine, *others = (ft.run(algorithm, fed, rounds=30).summary["mse_personal"] for algorithm in tried)
    assert mine < min(others)


def test_groups_far_apart_are_found():
    draw = np.random.default_rng(0)
    centers = np.array([[4.0, 0, 0], [0, 4.0, 0]])

    def rows(w, count):
        x = draw.normal(size=(count, 3))
        return x, x @ w + draw.normal(size=count)

    parts = ([rows(centers[i % 2], count) for i in range(12)] for count in (40, 100, 20))
    advice = ft.advise(ft.Federation.from_arrays(*parts))
    assert advice.clusters == 2
    assert len({advice.groups[i] for i in range(0, 12, 2)}) == len({advice.groups[i] for i in range(1, 12, 2)}) == 1
    assert advice.groups[0] != advice.groups[1]


def test_test_rows_are_never_looked_at():
    fed = federation(0.3, kind="classification")
    other = replace(fed, test=Split(torch.zeros_like(fed.test.x), torch.zeros_like(fed.test.y), fed.test.offsets))
    assert ft.advise(fed).json() == ft.advise(other).json()


def test_without_validation_rows_some_training_rows_are_set_apart():
    fed = replace(federation(0.3), val=None)
    split = with_validation(fed, 0.2, 0)
    assert split.val.sizes.tolist() == [8] * 12
    assert split.train.sizes.tolist() == [32] * 12
    for i in range(12):
        both = torch.cat([split.train.client(i)[1], split.val.client(i)[1]])
        assert torch.equal(both.sort().values, fed.train.client(i)[1].sort().values)
    assert ft.advise(fed).collaborate


def test_the_theorys_pull_is_that_of_partial_pooling():
    """Twelve 1-d clients, x = 1: w_i ~ N(0, tau^2), mean of n rows has variance s^2/n, so lam = s^2/(n tau^2)."""
    draw = np.random.default_rng(3)
    y = [draw.normal(size=50) * 2.0 for _ in range(12)]
    fed = ft.Federation.from_arrays([(np.ones((50, 1)), v) for v in y], [(np.ones((50, 1)), v) for v in y])
    s2 = float(np.mean([v.var(ddof=1) for v in y]))
    estimate = Heterogeneity(0.25, (0.1, 0.4), 0.0, False, (), "", 50, 1, 12, 0.25, 0.25)

    class Kind:
        kind = REGRESSION

    assert pull(estimate, fed, Kind, 0.25) == pytest.approx(s2 / (50 * 0.25), rel=0.03)  # a column of ones beside x costs 2 %
    assert np.isinf(pull(estimate, fed, Kind, 0.0))


def test_a_network_is_judged_on_its_last_layer():
    advice = ft.advise(federation(0.3), "mlp:3", rounds=10, batch_size=16)
    assert advice.heterogeneity.d == 4  # three features and a constant
    assert any("last layer" in note for note in advice.notes)


def test_a_budget_limits_the_race():
    fed = federation(0.3)
    few, many = ft.advise(fed, budget=8), ft.advise(fed)
    assert sum(row["rounds"] for row in few.race) <= 8
    assert few.steps_used < many.steps_used


def test_a_budget_of_bytes_limits_what_is_sent():
    fed = federation(0.3)
    size = {"FedAvg": 1, "Local": 0, "FedAvgFT": 1, "FedCLUP": 1}
    one = Race(
        build_task("linear", fed, 0, torch.float64, True), with_validation(fed, 0.2, 0), Options(rounds=50, dtype="float64")
    )
    one.enter("FedAvg", ft.FedAvg())
    price = one.price("FedAvg")  # all clients, down and up
    assert price > 12 * 2 * 5 * 8  # five float64 numbers each way, and a header
    few = ft.advise(fed, budget=f"{30.5 * price / 1000:.3f}kB", dtype="float64")
    rounds = {row["method"]: row["rounds"] * size[row["method"].split()[0]] for row in few.race}
    assert 10 < sum(rounds.values()) <= 31


@pytest.mark.parametrize(
    ("given", "left", "in_bytes"),
    [(None, None, False), (7, 7, False), ("7", 7, False), ("1.5MB", 1.5e6, True), ("20 B", 20, True)],
)
def test_a_budget_reads_rounds_and_traffic(given, left, in_bytes):
    assert Budget.of(given) == Budget(left, in_bytes)


def test_a_client_with_fewer_rows_is_pulled_more():
    fed = federation(0.3, m=10, n=15, seed=1)
    more = federation(0.3, m=10, n=60, seed=1)
    parts = [[getattr(f, split).client(i) for f in (fed, more) for i in range(10)] for split in ("train", "test", "val")]
    both = ft.Federation.from_arrays(*parts, task="regression")
    each = pulls(0.5, both)
    assert each["0"] == pytest.approx(4 * each["19"])  # a quarter of the rows
    assert np.mean([1 / 15] * 10 + [1 / 60] * 10) * 15 * each["0"] == pytest.approx(0.5)
    advice = ft.advise(both, rounds=20)
    assert advice.regime == "between"
    assert advice.lams == pulls(advice.lam, both)
    assert "a lam for every client" in advice.text
    again = ft.run(ft.FedCLUP(lam="client", lr=0.1, steps=5), both.with_facts(lam=advice.lams), rounds=3)
    assert np.isfinite(again.summary["mse_personal"])


def test_many_features_are_looked_at_along_random_directions():
    """R^2 / d of isotropic differences is the same along any directions."""
    draw = np.random.default_rng(3)
    d, m, n, scatter = 200, 12, 400, 0.2
    truth = scatter * draw.normal(size=(m, d))
    rows = [[(x := draw.normal(size=(k, d)), x @ w + 0.1 * draw.normal(size=k)) for w in truth] for k in (n, 10, 40)]
    fed = ft.Federation.from_arrays(*rows, task="regression")
    seen = look(build_task("linear", fed, 0, torch.float64, True), fed, {}, 0)
    assert any("random directions of the 200 features" in note for note in seen.notes)
    directions = seen.heterogeneity.d - 1  # and a constant
    assert directions == n // 5
    low, high = seen.heterogeneity.interval
    assert low <= scatter**2 * directions * (1 - 1 / m) <= high  # 12 clients' own R^2 is that of the population to some per cent


def test_groups_are_advised_one_by_one():
    draw = np.random.default_rng(0)
    centers = np.array([[4.0, 0, 0], [-4.0, 0, 0]])
    truth = np.concatenate([centers[0] + 0.0 * draw.normal(size=(8, 3)), centers[1] + 1.0 * draw.normal(size=(8, 3))])
    rows = [[(x := draw.normal(size=(k, 3)), x @ w + draw.normal(size=k)) for w in truth] for k in (60, 20, 20)]
    advice = ft.advise(ft.Federation.from_arrays(*rows, task="regression"), rounds=20)
    assert advice.clusters == 2
    inside = {tuple(group["clients"]): group for group in advice.inside}
    alike, apart = inside[tuple(map(str, range(8)))], inside[tuple(map(str, range(8, 16)))]
    assert alike["zero"]
    assert alike["lam"] is None
    assert not apart["zero"]
    low, high = apart["interval"]
    assert low <= ((truth[8:] - truth[8:].mean(0)) ** 2).sum(1).mean() <= high
    assert "Inside group 2" in advice.text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rounds": 0}, "rounds must be"),
        ({"budget": 0}, "budget must be"),
        ({"budget": "much"}, "budget must be"),
        ({"budget": "-5MB"}, "budget must be"),
        ({"budget": "1B"}, "does not pay"),
        ({"budget": 1}, "does not pay"),
        ({"steps": 2, "epochs": 2}, "not both"),
        ({"model": "mpl"}, "mlp"),
    ],
)
def test_bad_questions_are_refused(change, says):
    with pytest.raises(ft.errors.FedtailorError, match=says):
        ft.advise(federation(0.3), **{"model": "linear", **change})


def one(x, y):
    return [(x, y)] * 4


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.ones((6, 3)), np.array([0, 1, 0, 1, 0, 1])),  # constant columns
        (np.arange(12.0).reshape(6, 2), np.array([0, 0, 0, 1, 1, 1])),  # separable
        (np.random.default_rng(0).normal(size=(6, 20)), np.array([0, 1, 0, 1, 0, 1])),  # d > n
        (np.random.default_rng(0).normal(size=(2, 2)), np.array([0, 1])),  # two rows
    ],
    ids=["constant", "separable", "wide", "tiny"],
)
def test_poor_data_give_advice_without_a_silent_number(x, y):
    fed = ft.Federation.from_arrays(one(x, y), one(x, y))
    advice = ft.advise(fed, rounds=5)
    assert advice.text
    assert all(np.isfinite(v) for v in advice.gains.values())
    json.dumps(advice.json(), allow_nan=False)


def test_one_client_alone_is_refused():
    x, y = np.zeros((5, 2)), np.array([0, 1, 0, 1, 0])
    with pytest.raises(ft.errors.InvalidData, match="one client only"):
        ft.advise(ft.Federation.from_arrays([(x, y)], [(x, y)]))


def test_the_command_line_gives_the_same_advice(tmp_path):
    words = ["advise", "digits", "--clients", "4", "--rounds", "10"]
    result = CliRunner().invoke(app, [*words, "--json", "--out", str(tmp_path / "a")])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values == json.loads((tmp_path / "a" / "advice.json").read_text())
    assert values["algorithm"] == ft.advise(ft.Federation.load("digits", clients=4), rounds=10).json()["algorithm"]
    plain = CliRunner().invoke(app, words)
    assert plain.exit_code == 0
    assert "Use " in plain.stdout


# -- one verdict -----------------------------------------------------------------------------------------------------------
def test_one_score_one_test_and_one_sentence():
    advice = ft.advise(federation(0.5, m=8, kind="classification"), rounds=10, score="log_loss")
    values = advice.json()
    assert advice.verdict.score == "log_loss"
    assert advice.verdict.rows == "validation"
    assert values["verdict"]["sentence"] in advice.text
    assert advice.headline in advice.text
    assert "rises by" not in advice.text
    assert "R²" not in advice.text
    page = write(values)
    assert advice.verdict.sentence.replace("'", "&#x27;") in page
    first, second = values["race"][:2]
    ahead = (second["val_log_loss"] - first["val_log_loss"]) / second["se"]
    assert f"({ahead:.1f} standard errors)" in advice.text  # the page divides the same two numbers


def test_what_may_be_chance_is_not_advised_as_if_it_were_sure():
    """Clients who are alike and have few validation rows: nothing can be clear, whatever the race says."""
    draw = np.random.default_rng(4)
    rows = [[(draw.normal(size=(k, 2)), (draw.random(k) < 0.5) * 1) for _ in range(8)] for k in (40, 5, 5)]
    advice = ft.advise(ft.Federation.from_arrays(*rows), rounds=5)
    assert advice.verdict.outcome == "open"
    assert "not clearly better" in advice.headline or "as good as anything" in advice.headline
    assert "Learn together" not in advice.headline


def test_the_score_decides_and_the_loss_only_between_those_it_cannot_tell_apart():
    def entrant(label, scores, loss):
        return Entrant(label, None, None, None, np.array(scores), np.full(8, loss), np.full(8, 20.0), 5)

    clear = [entrant("a", [0.9] * 8, 0.9), entrant("b", [0.5] * 8, 0.1)]
    assert [e.label for e in ranked(clear, ACCURACY)] == ["a", "b"]
    noise = 0.7 + np.array([0.2, -0.2] * 4)
    close = [entrant("a", noise + 0.001, 0.9), entrant("b", 1.4 - noise, 0.1)]
    assert [e.label for e in ranked(close, ACCURACY)] == ["b", "a"]


def test_the_spread_is_read_under_its_earlier_name_too():
    advice = ft.advise(federation(0.5), rounds=5)
    assert advice.r2 == advice.spread
    assert advice.json()["spread"] == advice.json()["r2"] == advice.spread
