"""Thresholds chosen on validation, Huber's loss by name, class weights on the command line."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from sklearn.metrics import balanced_accuracy_score, f1_score
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli import app
from fedtailor.errors import InvalidArgument
from fedtailor.metrics.threshold import at, choose
from fedtailor.task.robust import huber


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(600, 2))
    y = np.where(x[:, 0] + draw.normal(size=600) > 1.3, "yes", "no")
    path = tmp_path_factory.mktemp("rows") / "t.csv"
    pd.DataFrame({"site": np.arange(600) % 3, "a": x[:, 0], "b": x[:, 1], "y": y}).to_csv(path, index=False)
    return path


@pytest.mark.parametrize(("name", "measure"), [("f1", f1_score), ("balanced_accuracy", balanced_accuracy_score)])
def test_the_threshold_is_the_best_of_all_by_scikit_learns_measure(name, measure):
    draw = np.random.default_rng(1)
    y = draw.random(80) < 0.3
    p = np.round(np.clip(0.3 * y + 0.6 * draw.random(80), 0.01, 0.99), 2)  # with ties
    cut = choose(name, p, y)
    best = max(measure(y, p >= c) for c in np.linspace(0.0, 1.0, 201))
    assert measure(y, p >= cut) == pytest.approx(best)
    assert at(cut, p, y)[name] == pytest.approx(best)
    assert choose(name, p, np.zeros(80, bool)) is None


def test_it_is_chosen_on_validation_and_predictions_go_by_it(patients, tmp_path):
    out = str(tmp_path / "run")
    words = ["run", "fedavg", str(patients), "--client", "site", "--label", "y", "--rounds", "5", "--threshold", "f1", "--json"]
    told = CliRunner().invoke(app, [*words, "--out", out])
    assert told.exit_code == 0, told.output
    summary = json.loads(told.stdout)
    cut = summary["threshold"]
    assert 0 < cut < 0.5  # three in ten are positive
    assert summary["at_threshold"]["f1"] >= summary["f1_rows_personal"] - 0.05
    said = CliRunner().invoke(app, ["predict", out, str(patients), "--json"])
    rows = pd.DataFrame(json.loads(said.stdout))
    assert ((rows["probability yes"] >= cut) == (rows["prediction"] == "yes")).all()
    assert not ((rows["probability yes"] >= 0.5) == (rows["prediction"] == "yes")).all()


def test_it_stands_in_the_table_the_report_and_the_exported_files(patients, tmp_path):
    out = tmp_path / "run"
    words = ["run", "fedavg", str(patients), "--client", "site", "--label", "y", "--rounds", "5", "--threshold", "f1"]
    told = CliRunner().invoke(app, [*words, "--out", str(out)])
    summary = json.loads((out / "summary.json").read_text())
    cut, at = summary["threshold"], summary["at_threshold"]
    shown = f"{cut:.4f}"
    assert "threshold" in told.stdout
    assert f"The class 'yes' is said from probability {shown} on" in " ".join(told.stdout.split())
    assert at["class"] == "yes"
    page = (out / "report.html").read_text()
    assert f"<td>{shown}</td>" in page
    assert f"<td>{at['sensitivity']:.4f}</td>" in page
    for more, ending in (([], "safetensors"), (["--onnx"], "onnx")):
        to = tmp_path / f"model.{ending}"
        done = CliRunner().invoke(app, ["export", str(out), "--to", str(to), *more])
        assert done.exit_code == 0, done.output
        if more:
            onnx = pytest.importorskip("onnx", reason="onnx is not installed")
            metadata = {prop.key: prop.value for prop in onnx.load(str(to)).metadata_props}
        else:
            with safe_open(to, "pt") as file:
                metadata = file.metadata()
        assert json.loads(metadata["threshold"]) == cut
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    frame = pd.read_csv(patients)
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    columns = {entry.name: frame[entry.name].to_numpy(float)[:, None] for entry in session.get_inputs()}
    probabilities, prediction = session.run(None, columns)
    assert ((probabilities[:, 1] >= cut) == (prediction == "yes")).all()
    assert not ((probabilities[:, 1] >= 0.5) == (prediction == "yes")).all()


def test_without_validation_rows_or_two_classes_it_is_refused():
    digits = ft.Federation.load("digits", clients=3)
    with pytest.raises(InvalidArgument, match="there are not two classes"):
        ft.run(ft.FedAvg(), digits, rounds=1, threshold="f1")


def test_class_weights_on_the_command_line_find_more_of_the_rare_class(patients, tmp_path):
    base = ["run", "fedavg", str(patients), "--client", "site", "--label", "y", "--rounds", "10", "--json"]
    found = {}
    for name, more in (("plain", []), ("balanced", ["--class-weights", "balanced"]), ("given", ["--class-weights", "1,5"])):
        told = CliRunner().invoke(app, [*base, *more, "--out", str(tmp_path / name)])
        assert told.exit_code == 0, told.output
        found[name] = json.loads(told.stdout)["balanced_personal"]
    assert min(found["balanced"], found["given"]) > found["plain"]


def test_huber_is_half_the_square_inside_and_linear_outside():
    loss, _ = huber("huber@2", torch.zeros(1))
    logits, y = torch.tensor([[1.0], [5.0], [-4.0]]), torch.zeros(3)
    torch.testing.assert_close(loss(logits, y), torch.tensor([0.5, 2 * 5 - 2.0, 2 * 4 - 2.0]))
    y = torch.tensor([0.0, 1.0, 2.0, 3.0, 1000.0])
    assert huber("huber", y)[0].delta == pytest.approx(1.345 * 1.4826 * 1.0)  # the median is 2, the median deviation 1


def test_outliers_do_not_move_a_robust_fit_far():
    draw = np.random.default_rng(0)

    def part(rows, spoil):
        out = []
        for _ in range(3):
            x = draw.normal(size=(rows, 2))
            y = 2 * x[:, 0] + 0.1 * draw.normal(size=rows)
            if spoil:
                y[:5] += 200
            out.append((x, y))
        return out

    fed = ft.Federation.from_arrays(part(80, True), part(40, False))
    plain, robust = (ft.run(ft.FedAvg(lr=0.1, steps=20), fed, rounds=20, **m).summary for m in ({}, {"loss": "huber"}))
    assert robust["mse_personal"] < plain["mse_personal"] / 10
    assert any("Huber's loss is linear beyond" in note for note in robust["notes"])
    with pytest.raises(InvalidArgument, match="huber is a loss of numbers"):
        ft.run(ft.FedAvg(), ft.Federation.load("digits", clients=3), rounds=1, loss="huber")
    with pytest.raises(InvalidArgument, match="must be a positive number"):
        ft.run(ft.FedAvg(), fed, rounds=1, loss="huber@-1")
