"""The sweep over lam: its ends are Problem (2)'s minima, its curves those of runs from scratch, its cost below four runs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.advisor.extrapolate import ahead, distance_left
from fedtailor.advisor.pilot import with_validation
from fedtailor.advisor.sweep import total
from fedtailor.advisor.tradeoff import Fewest, Place, Point, fewest, front, levels, round_budget, settled
from fedtailor.cli import app
from fedtailor.data.split import Split
from fedtailor.engine.options import SweepOptions
from fedtailor.engine.setup import build_task
from fedtailor.report.sweep import write
from fedtailor.theory.envelope import solve
from tests.make import federation


def curve(*scores, bytes_each=10):
    return [Point(i, i * bytes_each, s, -s) for i, s in enumerate(scores)]


def regression(scatter=0.5, m=6, n=40, d=3, seed=0, noise=0.5, truth=True, val=30):
    """Least squares with rows of unit covariance: L is about 2."""
    draw = np.random.default_rng(seed)
    center = draw.normal(size=d)
    own = [center + scatter * draw.normal(size=d) for _ in range(m)]

    def rows(w, count):
        x = draw.normal(size=(count, d))
        return x, x @ w + noise * draw.normal(size=count)

    parts = ([rows(w, count) for w in own] for count in (n, 10, val))
    return ft.Federation.from_arrays(*parts, truth=own if truth else None)


# -- the pure parts --------------------------------------------------------------------------------------------------------
def test_the_front_by_hand():
    curves = {0.1: curve(0.1, 0.5, 0.6), 1.0: curve(0.1, 0.4, 0.8)}
    assert front(curves, True) == [Place(0.1, 0, 0, 0.1), Place(0.1, 1, 10, 0.5), Place(1.0, 2, 20, 0.8)]
    errors = {lam: [replace(p, val_score=1 - p.val_score) for p in points] for lam, points in curves.items()}
    assert [(p.lam, p.round) for p in front(errors, False)] == [(0.1, 0), (0.1, 1), (1.0, 2)]


def test_on_the_front_ties_go_to_the_smaller_lam_and_standing_still_is_no_gain():
    curves = {2.0: curve(0.1, 0.5, 0.5, 0.4), 1.0: curve(0.1, 0.5, 0.5)}
    assert front(curves, True) == [Place(1.0, 0, 0, 0.1), Place(1.0, 1, 10, 0.5)]


def test_a_point_with_fewer_bytes_and_more_rounds_is_on_the_front_as_well():
    curves = {1.0: [Point(1, 50, 0.5, 0.0)], 2.0: [Point(3, 30, 0.5, 0.0)]}
    assert {p.lam for p in front(curves, True)} == {1.0, 2.0}


def test_the_fewest_rounds_by_hand():
    curves = {0.1: curve(0.1, 0.5, 0.6, 0.6), 1.0: curve(0.1, 0.4, 0.5, 0.8), 5.0: curve(0.1, 0.4, 0.6, 0.8)}
    assert fewest(curves, [0.5, 0.6, 0.8, 0.9], True) == [
        Fewest(0.5, 0.1, 1, 10),
        Fewest(0.6, 0.1, 2, 20),  # 5.0 takes as many: the smaller lam
        Fewest(0.8, 1.0, 3, 30),
        Fewest(0.9, None, None, None),
    ]
    cheap = {0.1: curve(0.1, 0.5), 1.0: curve(0.1, 0.5, bytes_each=3)}
    assert fewest(cheap, [0.5], True) == [Fewest(0.5, 1.0, 1, 3)]
    assert fewest({1.0: curve(9.0, 3.0, 2.0)}, [3.0], False) == [Fewest(3.0, 1.0, 1, 10)]


def test_a_target_that_is_passed_and_not_kept_is_not_reached():
    curves = {0.0004: curve(0.1, 0.789, 0.76, 0.7513), 1.0: curve(0.1, 0.6, 0.77, 0.78)}
    assert fewest(curves, [0.75, 0.77, 0.789], True) == [
        Fewest(0.75, 0.0004, 1, 10),
        Fewest(0.77, 1.0, 2, 20),
        Fewest(0.789, None, None, None),
    ]


def test_the_verdict_is_of_the_best_end_against_training_alone_and_stands_on_the_page(tmp_path):
    fed = ft.Federation.load("digits", clients=6, partition="dirichlet:0.3")
    swept = ft.sweep(fed, rounds=4, lams=2, dynamic=False)
    assert swept.verdict.method == f"FedCLUP lam={swept.best:.3g}"
    assert swept.verdict.rows == "validation"
    assert swept.json()["verdict"]["sentence"] == swept.verdict.sentence
    assert swept.verdict.sentence in swept.text
    path = write(swept.json(), tmp_path / "report.html", "fedtailor sweep digits")
    text = path.read_text()
    assert swept.verdict.sentence.replace("'", "&#x27;") in text
    assert "to reach and keep" in text
    assert "<svg" in text


def test_targets_lie_between_the_worst_and_the_best():
    assert levels([0.5, 0.9, 0.7], True) == pytest.approx([0.6, 0.7, 0.8, 0.86, 0.9])
    assert levels([0.5, 0.9, 0.7], False) == pytest.approx([0.8, 0.7, 0.6, 0.54, 0.5])
    assert levels([0.5, 0.5], True) == [0.5]


@pytest.mark.parametrize("rounds", [6, 7, 10, 50, 333])
def test_ten_lams_may_cost_less_than_four_runs(rounds):
    assert round_budget(rounds, 10) < 4 * rounds
    assert total(SweepOptions(rounds=rounds, lams=10, dynamic=False)) < 4 * rounds


def test_a_curve_is_settled_where_its_loss_stays_near_the_end():
    points = [Point(i, i, 0.0, loss) for i, loss in enumerate([2.0, 1.04, 1.2, 1.04, 1.0])]
    assert settled(points).round == 3
    assert settled(points[:1]).round == 0


def test_rounds_ahead_of_a_linear_iteration_are_found():
    """e_t = 0.1^t a + 0.8^t b: two rates, found from seven rounds as finely as the grid of rates is."""
    draw = torch.Generator().manual_seed(0)
    a, b, end = torch.randn(3, 50, dtype=torch.float64, generator=draw)
    path = torch.stack([end + 0.1**t * a + 0.8**t * b for t in range(30)])
    estimated = end + torch.from_numpy(ahead(path[:7], end, 23)) @ (path[:7] - end)
    apart = (estimated - path[7:]).norm(dim=1) / (path[6] - end).norm()
    assert apart.max() < 0.05
    stayed = (path[7:] - path[6]).norm(dim=1) / (path[6] - end).norm()
    assert stayed[-1] > 0.9  # there was something to find


def test_rounds_ahead_never_lead_away_from_the_end():
    draw = torch.Generator().manual_seed(1)
    path, end = torch.randn(5, 20, generator=draw), torch.randn(20, generator=draw)  # no order at all
    shares = torch.from_numpy(ahead(path, end, 40))
    lengths = (shares @ (path - end).double()).norm(dim=1)
    assert (lengths <= (path[-1] - end).norm() * 1.0001).all()
    assert ahead(path, path[-1], 3).tolist() == np.zeros((3, 5)).tolist()  # it is there


def test_what_is_left_is_the_rest_of_the_geometric_series():
    points = [torch.tensor([0.5**t]) for t in range(3)]
    assert distance_left(*points) == pytest.approx(0.25)
    assert distance_left(*points[::-1]) == np.inf  # the changes grow
    assert distance_left(points[0], points[1], points[1]) == 0


# -- against the theory ----------------------------------------------------------------------------------------------------
def test_every_end_is_the_minimum_of_problem_2():
    """The ends' distance to the exact solution is below a thousandth of the untrained model's (squared: 1e-6)."""
    fed = regression(truth=False)
    swept = ft.sweep(fed, rounds=40, dtype="float64", dynamic=False)
    assert swept.error_of == "solution"
    assert len(swept.path) == 10
    for one in swept.path:
        assert one.rested
        assert one.end.error < 1e-6 * one.curve[0].error


def test_the_error_is_the_distance_to_the_truth_where_that_is_known():
    fed = regression()
    swept = ft.sweep(fed, lams=[0.1, 1.0], rounds=40, dtype="float64", dynamic=False)
    assert swept.error_of == "truth"
    task = build_task("linear", fed.to(torch.float64), 0, torch.float64, True)
    for one in swept.path:
        exact = solve(task, fed.to(torch.float64), one.lam)
        parts = zip(exact.models, fed.truth, strict=True)
        apart = [float(((m["weight"] - t["weight"]) ** 2).sum() + m["bias"] ** 2) for m, t in parts]
        assert one.end.error == pytest.approx(np.mean(apart), rel=1e-3)
    assert swept.path[0].curve[0].error == pytest.approx(np.mean([float((t["weight"] ** 2).sum()) for t in fed.truth]))


def test_ten_lams_cost_less_than_four_runs_and_lead_where_separate_runs_lead():
    fed = regression(truth=False)
    swept = ft.sweep(fed, rounds=30, dynamic=False)
    assert swept.rounds_separate == 300
    assert sum(one.rounds_used for one in swept.path) < swept.rounds_used < 120
    rows = replace(fed, test=fed.val)
    for one in swept.path[::3]:
        separate = ft.run(one.algorithm, rows, rounds=100, evaluate_every=0).summary
        assert one.end.val_score == pytest.approx(separate["mse_personal"], rel=1e-3)


def excess(points, aim):
    """Rounds until the loss is within one per cent of the way of where a long run leads."""
    near = aim + 0.01 * (points[0].val_loss - aim)
    return next((p.round for p in points if p.val_loss <= near), None)


def test_rounds_are_those_of_runs_from_scratch():
    """With one step per round and rows of unequal scale (the curves last longer than the rounds played): the rounds to a target,
    estimated, are within a factor 1.5 of those of real runs from scratch."""
    draw = np.random.default_rng(5)
    scale = np.array([1.0, 0.5, 0.3])
    center = draw.normal(size=3) * 3

    def rows(w, count):
        x = draw.normal(size=(count, 3)) * scale
        return x, x @ w + 0.3 * draw.normal(size=count)

    own = [center + 0.3 * draw.normal(size=3) for _ in range(6)]
    fed = ft.Federation.from_arrays(*([rows(w, count) for w in own] for count in (60, 10, 40)))
    swept = ft.sweep(fed, rounds=40, steps=1, dynamic=False)
    assert swept.rounds_used < 160
    guessed = 0
    for one in swept.path:
        real = ft.run(one.algorithm, replace(fed, test=fed.val), rounds=40, evaluate_every=1).history
        losses = [one.curve[0].val_loss, *(record["loss_personal"] for record in real)]
        for at in range(one.measured + 1):
            assert one.curve[at].val_loss == pytest.approx(losses[at], rel=1e-5)  # what was measured is a run from scratch
        aim = losses[-1]
        true = excess([Point(i, i, 0.0, loss) for i, loss in enumerate(losses)], aim)
        estimate = excess(one.curve, aim)
        assert estimate is not None
        assert true / 1.5 <= estimate <= true * 1.5
        guessed += estimate > one.measured
    assert guessed >= 3  # the estimate was put to the test


def test_the_limits_are_training_alone_and_one_model():
    fed = regression(truth=False)
    swept = ft.sweep(fed, lams=[1e-5, 1e-3, 1.0, 1e3, 1e5], rounds=60, dtype="float64", dynamic=False)
    rows = replace(fed, test=fed.val)
    local = ft.run(ft.Local(lr=0.3, steps=10), rows, rounds=30, dtype="float64", evaluate_every=0).summary
    pooled = ft.run(ft.FedAvg(lr=0.3, steps=1), rows, rounds=100, dtype="float64", evaluate_every=0).summary
    assert swept.path[0].end.val_score == pytest.approx(local["mse_personal"], rel=1e-3)
    assert swept.ends["local"]["val_score"] == pytest.approx(local["mse_personal"], rel=1e-3)
    assert swept.path[-1].end.val_score == pytest.approx(pooled["mse_personal"], rel=1e-3)
    assert swept.ends["shared"]["val_score"] == pytest.approx(pooled["mse_personal"], rel=1e-3)
    assert local["mse_personal"] != pytest.approx(pooled["mse_personal"], rel=0.05)


def test_a_smaller_lam_settles_in_fewer_rounds():
    """CLUP: rounds grow with lam, as kappa (lam + mu)/(lam + L) does."""
    swept = ft.sweep(regression(truth=False), lams=[0.01, 1.0, 100.0], rounds=40, dynamic=False)
    first, second, third = (settled(one.curve).round for one in swept.path)
    assert first <= second <= third
    assert first < third


# -- what it looks at ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_test_rows_are_never_looked_at(kind):
    fed = federation([12, 9, 15], kind=kind, val=True)
    spoilt = Split(torch.full_like(fed.test.x, torch.nan), torch.zeros_like(fed.test.y), fed.test.offsets)
    options = {"lams": 3, "rounds": 8}
    assert ft.sweep(fed, **options).json() == ft.sweep(replace(fed, test=spoilt), **options).json()


def test_scores_are_means_over_clients_of_their_validation_rows():
    """Before the first round the linear model says zero: MSE is the clients' mean of the mean square of y."""
    fed = federation([12, 9, 15], kind="regression", val=True)
    swept = ft.sweep(fed, lams=2, rounds=6, dynamic=False)
    squares = [float((fed.val.client(i)[1] ** 2).mean()) for i in range(3)]
    assert swept.path[0].curve[0].val_score == pytest.approx(np.mean(squares), rel=1e-6)


def test_without_validation_rows_some_training_rows_are_set_apart():
    fed = federation([12, 9, 15])
    split = with_validation(fed, 0.2, 0)
    options = {"lams": 2, "rounds": 6, "dynamic": False}
    assert ft.sweep(fed, **options).json() == ft.sweep(split, **options).json()


def test_bytes_are_those_of_runs():
    fed = federation([12, 9, 15], val=True)
    swept = ft.sweep(fed, lams=2, rounds=6)
    real = ft.run(swept.path[0].algorithm, fed, rounds=6).summary
    each = (real["bytes_down"] + real["bytes_up"]) // 6
    assert all(point.bytes == each * point.round for one in swept.path for point in one.curve)
    grown = ft.run(swept.dynamic.algorithm, fed, rounds=6).summary
    assert swept.dynamic.curve[-1].bytes == grown["bytes_down"] + grown["bytes_up"]


def test_the_dynamic_schedule_is_a_run_of_its_own():
    fed = federation([12, 9, 15], kind="regression", val=True)
    records = []
    swept = ft.sweep(fed, lams=3, rounds=8, callback=records.append)
    real = ft.run(swept.dynamic.algorithm, replace(fed, test=fed.val), rounds=8, evaluate_every=1)
    scores = [record["mse_personal"] for record in real.history]
    assert [point.val_score for point in swept.dynamic.curve[1:]] == pytest.approx(scores)
    assert not swept.dynamic.estimated
    assert swept.dynamic.rounds_used == 8
    assert len(records) == swept.rounds_used + 8  # not counted with the others
    assert len(records) <= total(SweepOptions(rounds=8, lams=3))
    assert ft.sweep(fed, lams=3, rounds=8, dynamic=False).dynamic is None


@pytest.mark.parametrize("method", ["ditto", ft.L2GD])
def test_any_method_with_a_lam_is_played_in_full(method):
    """Its points are those of runs from scratch, its bytes those of the rounds in which something is sent."""
    fed = federation([12, 9, 15], kind="regression", val=True)
    swept = ft.sweep(fed, method=method, lams=[0.01, 0.1], rounds=6, steps=1)
    for one in swept.path:
        real = ft.run(one.algorithm, replace(fed, test=fed.val), rounds=6, evaluate_every=1)
        assert [point.val_score for point in one.curve[1:]] == pytest.approx([record["mse_personal"] for record in real.history])
        assert one.curve[-1].bytes == real.summary["bytes_down"] + real.summary["bytes_up"]
        assert (one.algorithm.lam, one.estimated) == (one.lam, False)
    assert (swept.dynamic, swept.rounds_used) == (None, 24)
    assert total(SweepOptions(rounds=6, lams=2), method) == 24
    assert "nothing is estimated" in swept.text


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"cohort": 0.5},
        {"weights": "size"},
        {"model": "mlp:3", "batch_size": 8},
        {"model": "mlp:3", "epochs": 1},
    ],
    ids=["batches", "cohort", "weights", "network on batches", "network"],
)
def test_other_settings_give_a_whole_result(options):
    fed = federation([12, 9, 15, 7], val=True)
    swept = ft.sweep(fed, lams=3, rounds=9, **options)
    assert [one.lam for one in swept.path] == sorted(one.lam for one in swept.path)
    assert swept.rounds_used <= total(SweepOptions(rounds=9, lams=3, dynamic=False))
    assert [row.target for row in swept.fewest] == sorted(row.target for row in swept.fewest)
    json.dumps(swept.json(), allow_nan=False)
    assert all(one.curve[-1].round <= 9 for one in swept.path)


# -- refusals and the command line -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lams": [0.0, 1.0]}, "every lam must be a positive number, not 0.0"),
        ({"lams": [-1.0, 1.0]}, "every lam must be a positive number"),
        ({"lams": [float("inf"), 1.0]}, "every lam must be a positive number"),
        ({"lams": [1.0, 1.0]}, "two different lams"),
        ({"lams": []}, "two different lams"),
        ({"lams": 1}, "at least 2"),
        ({"lams": True}, "a number of lams"),
        ({"lams": "many"}, "a number of lams"),
        ({"rounds": 0}, "rounds must be"),
        ({"steps": 2, "epochs": 2}, "not both"),
        ({"lr": 0}, "lr must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"targets": [float("nan")]}, "targets must be"),
        ({"targets": "high"}, "targets must be"),
        ({"cohort": 9}, "more than the 3 clients"),
        ({"method": "fedavg"}, "fedavg cannot be swept: it has no setting lam"),
        ({"method": ft.Ditto()}, "the class or the name of a method"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"model": "mpl"}, "mlp"),
    ],
    ids=str,
)
def test_bad_questions_are_refused(change, says):
    with pytest.raises(ft.errors.FedtailorError, match=says) as caught:
        ft.sweep(federation([4, 5, 6], val=True), **{"model": "linear", **change})
    assert "\n" not in str(caught.value)


def test_one_client_or_one_row_is_refused():
    with pytest.raises(ft.errors.InvalidData, match="one client only"):
        ft.sweep(federation([9]))
    with pytest.raises(ft.errors.InvalidData, match="one training row"):
        ft.sweep(federation([9, 1]))


def test_a_step_that_diverges_is_refused():
    with pytest.raises(ft.errors.InvalidArgument, match=r"diverges.*smaller lr"):
        ft.sweep(regression(), "mlp:8", lams=2, rounds=30, lr=1e6)


NAMES = {
    "kind",
    "score",
    "clients",
    "rounds",
    "path",
    "dynamic",
    "ends",
    "front",
    "fewest",
    "rounds_used",
    "rounds_separate",
    "share",
}


def test_the_command_line_gives_the_same(tmp_path):
    words = ["sweep", "digits", "--clients", "4", "--rounds", "6", "--lams", "0.01,1", "--targets", "0.5,0.99"]
    result = CliRunner().invoke(app, [*words, "--json", "--out", str(tmp_path / "s")])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values == json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert values.keys() >= NAMES
    assert values["share"] == values["rounds_used"] / values["rounds_separate"]
    assert values["ends"].keys() == {"local", "shared"}
    for one in (*values["path"], values["dynamic"]):
        assert one.keys() >= {"lam", "curve", "end", "rounds_used", "estimated"}
        assert one["end"].keys() == {"val_score", "val_loss", "error"}
        assert all(point.keys() == {"round", "bytes", "val_score", "val_loss", "error"} for point in one["curve"])
    assert [one["lam"] for one in values["path"]] == [0.01, 1.0]
    assert values["dynamic"]["lam"] is None
    assert [row["target"] for row in values["fewest"]] == [0.5, 0.99]
    assert all(row.keys() == {"target", "lam", "rounds", "bytes"} for row in values["fewest"])
    assert all(place.keys() == {"lam", "round", "bytes", "val_score"} for place in values["front"])
    fed = ft.Federation.load("digits", clients=4)
    assert values == json.loads(json.dumps(ft.sweep(fed, lams=[0.01, 1.0], rounds=6, targets=[0.5, 0.99]).json()))


def test_the_command_line_prints_words_and_a_table(tmp_path):
    words = [
        "sweep",
        "digits",
        "--clients",
        "3",
        "--rounds",
        "6",
        "--lams",
        "2",
        "--no-dynamic",
        "--save-config",
        str(tmp_path / "s.toml"),
    ]
    plain = CliRunner().invoke(app, words)
    assert plain.exit_code == 0, plain.output
    assert "rounds played in place of 12" in plain.stdout
    assert "Target" in plain.stdout
    again = CliRunner().invoke(app, ["sweep", "--config", str(tmp_path / "s.toml")])
    assert again.stdout == plain.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lams", "0,1"], "every lam must be a positive number"),
        (["--lams", "few"], "lams must be a number of lams"),
        (["--lams", "1"], "at least 2"),
        (["--clients", "1"], "one client only"),
        (["--steps", "2", "--epochs", "2"], "not both"),
    ],
    ids=["zero", "word", "one", "alone", "both"],
)
def test_the_command_line_refuses_in_one_line(words, says):
    result = CliRunner().invoke(app, ["sweep", "digits", *words])
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output
