"""A loss, weights of classes, measures and a start of one's own."""

from __future__ import annotations

import json
import sys
import tomllib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor import tree
from fedtailor.algorithms import origin
from fedtailor.cli import app
from fedtailor.engine.options import Options
from fedtailor.engine.pieces import class_weights
from fedtailor.engine.prepare import prepare
from fedtailor.errors import BadRun, InvalidArgument, ModelMismatch
from fedtailor.runs.models import read
from fedtailor.task import Task
from tests.make import federation, pairs, seeded

DATA = federation((7, 5, 9, 6), val=True)
SETTINGS = {"rounds": 2, "workers": 1, "dtype": "float64", "batch_size": 4}
ENGINES = ["loop", "vectorized"]
SOURCE = """
import torch.nn.functional as F


def smooth(logits, y):
    return F.cross_entropy(logits, y, reduction="none", label_smoothing=0.2)


def recall(logits, y):
    found = (logits.argmax(1) == 1) & (y == 1)
    return found.sum() / (y == 1).sum().clamp(min=1)


CONSTANT = 3
"""


def smooth(logits, y):
    return F.cross_entropy(logits, y, reduction="none", label_smoothing=0.2)


def right(logits, y):
    return (logits.argmax(1) == y).double().mean()


def step_by_hand(loss, client, lr=0.3):
    """A linear model after one full step on the mean of a loss."""
    task = Task.from_module(seeded(nn.Linear, 3, 2))
    start = tree.map(lambda leaf: leaf.requires_grad_(), task.init())
    x, y = DATA.to(torch.float64).train.client(client)
    slopes = torch.autograd.grad(loss(task.apply(start, x), y), list(start.values()))
    return {name: leaf.detach() - lr * slope for (name, leaf), slope in zip(start.items(), slopes, strict=True)}


def one_step(**settings):
    run = ft.run(ft.Local(lr=0.3, steps=1), DATA, seeded(nn.Linear, 3, 2), rounds=1, workers=1, dtype="float64", **settings)
    return run.store.get(np.array([1]))["model"]


def assert_close(found, expected):
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name][0], leaf, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_of_ones_own_is_what_is_descended_on(engine):
    assert_close(one_step(engine=engine, loss=smooth), step_by_hand(lambda out, y: smooth(out, y).mean(), 1))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_reaches_the_layers_behind_a_frozen_prefix(engine):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    runs = [ft.run(ft.Local(), DATA, module, engine=engine, loss=loss, **SETTINGS) for loss in (None, smooth)]
    models = [run.store.get(np.array([0]))["model"]["2.weight"] for run in runs]
    assert float((models[0] - models[1]).abs().max()) > 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_classes_count_in_the_loss_by_their_weights(engine):
    weights = torch.tensor([0.5, 3.0], dtype=torch.float64)

    def by_hand(out, y):
        return (F.cross_entropy(out, y, reduction="none") * weights[y]).mean()

    assert_close(one_step(engine=engine, class_weights=(0.5, 3.0)), step_by_hand(by_hand, 1))


def test_balanced_weights_give_every_class_the_same_sum():
    y = DATA.train.y
    weights = class_weights(DATA, "balanced")
    sums = [weight * int((y == label).sum()) for label, weight in enumerate(weights)]
    assert sums == pytest.approx([len(y) / 2] * 2)


@pytest.mark.parametrize(
    ("weights", "says"),
    [((1.0,), "1 numbers for 2 classes"), ((1.0, -1.0), "one positive number per class"), ("even", "'balanced'")],
)
def test_weights_that_do_not_fit_are_refused(weights, says):
    with pytest.raises(InvalidArgument, match=says):
        ft.run(ft.Local(), DATA, class_weights=weights, **SETTINGS)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_measure_of_ones_own_is_in_the_history_the_summary_and_the_table(engine):
    run = ft.run(ft.Ditto(), DATA, engine=engine, metrics={"right": right}, evaluate_every=1, **SETTINGS)
    assert run.summary["right_personal"] == pytest.approx(run.summary["acc_personal"])
    assert run.summary["right_global"] == pytest.approx(run.summary["acc_global"])
    assert [r["right_personal"] for r in run.history] == pytest.approx([r["acc_personal"] for r in run.history])
    np.testing.assert_allclose(run.clients["right_personal"], run.clients["acc_personal"])
    assert run.summary["own_measures"] == ["right"]
    compared = ft.compare([ft.FedAvg(), ft.Local()], DATA, engine=engine, metrics=[right], **SETTINGS)
    assert [row["right_personal"] for row in compared.table("right_personal")] == pytest.approx(
        [row["acc_personal"] for row in compared.table("acc_personal")]
    )


def other_f1(logits, y):
    return 0.25 + 0.5 * (y == 1).double().mean()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_measure_with_the_name_of_one_of_ours_takes_its_place_and_is_noted(engine, tmp_path):
    """Before: ``metrics={"f1": function}`` was refused."""
    settings = {**SETTINGS, "engine": engine, "evaluate_every": 1}
    ours = ft.run(ft.Ditto(), DATA, **settings)
    run = ft.run(ft.Ditto(), DATA, metrics={"f1": other_f1}, score="f1", out=tmp_path / "run", **settings)
    expected = [0.25 + 0.5 * float((DATA.test.client(i)[1] == 1).double().mean()) for i in range(len(DATA))]
    np.testing.assert_allclose(run.clients["f1_personal"], expected)
    assert [record["f1_personal"] for record in run.history] == pytest.approx([np.mean(expected)] * 2)
    assert run.summary["score"] == "f1"
    assert "f1_rows_personal" in ours.summary
    assert "f1_rows_personal" not in run.summary  # rows of all clients are no client's
    assert any("f1 is the function that was given" in note for note in run.summary["notes"])
    assert run.summary["acc_personal"] == ours.summary["acc_personal"]


def test_a_measure_with_the_name_of_one_of_ours_is_read_as_that_one_is():
    task = prepare(ft.Local(), DATA, "linear", Options.of({"metrics": {"brier": other_f1, "mine": other_f1}})).task
    by_name = {metric.name: metric for metric in task.measured}
    assert (by_name["brier"].higher, by_name["mine"].higher, by_name["brier"].late) == (False, True, False)


def test_a_newcomer_of_a_run_with_a_score_of_ones_own_is_judged_by_accuracy(tmp_path):
    ft.run(ft.Ditto(), DATA, metrics={"f1": other_f1}, score="f1", out=tmp_path / "run", **SETTINGS)
    x, y = DATA.train.client(2)
    assert ft.onboard(read(tmp_path / "run"), x, y, "new").record["score"] == "acc"


def test_a_measure_of_ones_own_is_a_score_however_many_classes_there_are():
    data = ft.Federation.from_arrays(pairs((9, 9), classes=3), pairs((5, 5), seed=1, classes=3))
    run = ft.run(ft.Local(), data, metrics={"apt": right}, score="apt", **SETTINGS)
    assert run.summary["apt_personal"] == pytest.approx(run.summary["acc_personal"])


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"acc": right}, "cannot be called 'acc'"),
        ({"loss": right}, "cannot be called 'loss'"),
        ({"two words": right}, "cannot be called"),
        ({"f": lambda logits, y: logits}, "the metric f fails on a client's"),
        (["nowhere.py:f1"], "no function 'f1' in nowhere.py"),
    ],
)
def test_a_measure_that_cannot_be_is_refused(metrics, says):
    with pytest.raises(InvalidArgument, match=says):
        ft.run(ft.Local(), DATA, metrics=metrics, **SETTINGS)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A file with functions of one's own, in the working directory."""
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "mine.py"


def test_a_loss_and_measures_are_named_on_the_command_line_and_found_again(source, tmp_path):
    words = ["run", "fedavg", "clup-logistic", "--clients", "4", "--rounds", "2", "--engine", "loop", "--workers", "1"]
    own = ["--loss", "mine.py:smooth", "--metrics", "mine.py:recall,hit=mine.py:recall", "--class-weights", "1,2", "--json"]
    said = CliRunner().invoke(app, [*words, *own, "--out", "done"])
    assert said.exit_code == 0, said.output
    summary = json.loads((tmp_path / "done" / "summary.json").read_text())
    assert 0 <= summary["recall_personal"] == summary["hit_personal"] <= 1
    report = (tmp_path / "done" / "report.html").read_text()
    assert all(f'<th scope="col">{title}</th>' in report for title in ("personal recall", "shared recall", "personal hit"))
    written = tomllib.loads((tmp_path / "done" / "config.toml").read_text())
    assert written["loss"].startswith("mine.py:smooth@")
    assert [entry.partition("@")[0] for entry in written["metrics"]] == ["mine.py:recall", "hit=mine.py:recall"]
    assert written["class_weights"] == [1.0, 2.0]
    assert CliRunner().invoke(app, ["resume", "done"]).exit_code == 0
    source.write_text(SOURCE.replace("0.2", "0.3"))
    origin._functions.clear()  # as in a new process
    said = CliRunner().invoke(app, ["resume", "done"])
    assert said.exit_code == 2
    assert "now holds another smooth" in " ".join(said.output.split())


def test_a_function_in_a_file_is_written_with_a_fingerprint_and_refused_once_it_has_changed(tmp_path):
    spec = origin.spec_of(smooth)
    place, _, digest = spec.partition(":smooth@")
    assert place.endswith("test_pieces.py") or place == "tests.engine.test_pieces"
    assert len(digest) == origin.LENGTH
    with pytest.raises(BadRun, match="now holds another smooth"):
        origin.function_of(f"{place}:smooth@{'0' * origin.LENGTH}")


def test_code_inside_a_run_directory_is_not_executed(source, tmp_path):
    with pytest.raises(BadRun, match="never executed"):
        origin.function_of("mine.py:smooth", tmp_path)


def test_functions_that_hold_other_values_are_told_apart():
    def scaled(factor):
        return lambda out, y: factor * smooth(out, y)

    first, same, other = (origin.spec_of(scaled(factor)) for factor in (2.0, 2.0, 3.0))
    assert first == same != other
    tensors = [scaled(torch.tensor(2.0)) for _ in range(2)]  # what they hold is not looked into
    specs = [origin.spec_of(function) for function in tensors]
    assert specs[0] != specs[1]
    assert [origin.function_of(spec) for spec in specs] == tensors


def test_a_function_without_a_file_ties_the_run_to_python(tmp_path):
    settings = {**SETTINGS, "engine": "loop", "out": tmp_path / "run"}
    first = ft.run(ft.Local(), DATA, loss=lambda out, y: 2 * smooth(out, y), **settings)
    again = ft.run(ft.Local(), DATA, loss=lambda out, y: 2 * smooth(out, y), resume=True, **settings)
    assert again.summary["loss_personal"] == first.summary["loss_personal"]
    with pytest.raises(BadRun, match="loss="):
        ft.run(ft.Local(), DATA, loss=lambda out, y: 3 * smooth(out, y), resume=True, **settings)


# -- start --------------------------------------------------------------------------------------------------------------
def test_a_run_starts_where_another_ended(tmp_path):
    first = ft.run(ft.FedAvg(), DATA, out=tmp_path / "first", **SETTINGS)
    second = ft.run(ft.FedAvg(lr=1e-12), DATA, start=tmp_path / "first", engine="loop", **SETTINGS)
    for name, leaf in first.shared["model"].items():
        torch.testing.assert_close(second.shared["model"][name], leaf, rtol=0, atol=1e-10)


def test_a_start_that_is_not_finite_says_so():
    state = {"weight": torch.full((2, 3), torch.nan), "bias": torch.zeros(2)}
    with pytest.raises(ModelMismatch, match="numbers in weight that are not finite"):
        ft.run(ft.FedAvg(), DATA, start=state, **SETTINGS)


def test_a_start_that_does_not_fit_says_so(tmp_path):
    ft.run(ft.FedAvg(), DATA, out=tmp_path / "linear", **SETTINGS)
    with pytest.raises(ModelMismatch, match="differs in"):
        ft.run(ft.FedAvg(), DATA, "mlp", start=tmp_path / "linear", **SETTINGS)
    ft.run(ft.Local(), DATA, out=tmp_path / "alone", **SETTINGS)
    with pytest.raises(InvalidArgument, match="no shared model to start from"):
        ft.run(ft.FedAvg(), DATA, start=tmp_path / "alone", **SETTINGS)
    with pytest.raises(BadRun, match="is not a run directory"):
        ft.run(ft.FedAvg(), DATA, start=tmp_path / "nothing", **SETTINGS)
