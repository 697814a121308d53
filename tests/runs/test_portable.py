"""Models for other programs: what a file says is enough to predict without us."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open

import fedtailor as ft
from fedtailor.runs import models, onnx_graph
from tests.cli.test_cli import answer, done, refusal

COLUMNS = ("--client", "who", "--label", "y")
NUMBERS = ("age", "score", "seen")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(rows: int = 240, regression: bool = False) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"who": draw.choice(["A", "B", "C"], rows), "age": draw.normal(50, 9, rows).round(1)})
    frame["score"] = np.where(draw.random(rows) < 0.2, np.nan, 1e6 + draw.normal(0, 2, rows).round(3))
    frame["drug"] = draw.choice(["none of them", "missing", "x", "y"], rows)
    frame.loc[draw.random(rows) < 0.1, "drug"] = np.nan
    frame["city"] = [f"town {int(i**1.5)}" for i in draw.integers(0, 40, rows)]
    frame["seen"] = pd.to_datetime("2020-03-01") + pd.to_timedelta(draw.integers(0, 400, rows), unit="D")
    frame["smoker"] = draw.choice([True, False], rows)
    signal = (frame["age"] - 50) / 9 + (frame["drug"] == "x") + draw.normal(size=rows)
    frame["y"] = signal * 30 + 500 if regression else np.where(signal > 0, "ill", "well")
    return frame


def by_hand(path: Path, frame: pd.DataFrame) -> np.ndarray:
    """The linear model's answers from its file alone, with NumPy."""
    with safe_open(path, "numpy") as file:
        about, weight, bias = file.metadata(), file.get_tensor("weight"), file.get_tensor("bias")
    features = []
    for column in json.loads(about["columns"]):
        cells = frame[column["name"]]
        if column["kind"] == "category":
            cells = cells.fillna("missing").where(cells.isna() | cells.isin(column["categories"]), "other")
            features += [(cells == category).to_numpy(float) for category in column["categories"]]
            continue
        values = cells.to_numpy("datetime64[D]").astype(float) if column["kind"] == "date" else cells.to_numpy(float)
        values = values - column["origin"]
        filled = np.where(np.isnan(values), column["fill"], values)
        features.append((filled - column["mean"]) / column["scale"])
        if column["has_indicator"]:
            features.append(np.isnan(values).astype(float))
    assert len(features) == len(json.loads(about["features"])) == weight.shape[1]
    out = np.stack(features, 1) @ weight.T + bias
    if about["kind"] == "regression":
        label = json.loads(about["label"])
        return out * label["scale"] + label["mean"]
    shares = np.exp(out - out.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def probabilities(rows: list[dict]) -> np.ndarray:
    frame = pd.DataFrame(rows)
    if "probability ill" not in frame:
        return frame[["prediction"]].to_numpy(float)
    return frame[["probability ill", "probability well"]].to_numpy(float)


def raw(frame: pd.DataFrame, session) -> dict[str, np.ndarray]:
    feeds = {}
    for column in session.get_inputs():
        cells = frame[column.name]
        if column.type == "tensor(string)":
            values = cells.fillna("").to_numpy(object)
        else:
            values = cells.to_numpy("datetime64[D]").astype(float) if column.name == "seen" else cells.to_numpy(float)
        feeds[column.name] = values[:, None]
    return feeds


@pytest.mark.parametrize(
    ("model", "regression", "more"),
    [
        ("linear", False, ("--standardize", "client")),
        ("linear", True, ("--with", "standardize_label=true")),
        ("mlp:5,4", False, ("--dtype", "float64")),
    ],
    ids=["client scale", "regression", "mlp"],
)
def test_files_predict_as_the_command_does(model, regression, more):
    onnxruntime = pytest.importorskip("onnxruntime")
    frame = table(regression=regression)
    frame.to_csv("t.csv", index=False)
    done("run", "ditto", "t.csv", *COLUMNS, "--rounds", "4", "--lr", "0.05", "--model", model, "--out", "r", *more)
    new = table(300, regression).iloc[200:]
    new.to_csv("new.csv", index=False)
    expected = probabilities(answer("predict", "r", "new.csv", "--client", "B"))
    scale = max(1, np.abs(expected).max())
    done("export", "r", "--client", "B", "--to", "b.safetensors")
    if model == "linear":
        np.testing.assert_allclose(by_hand(Path("b.safetensors"), new), expected, atol=1e-5 * scale)
    record = answer("export", "r", "--client", "B", "--onnx")
    assert record["written"] == ["model.onnx"]
    assert record["difference"] <= 1e-5
    session = onnxruntime.InferenceSession("model.onnx")
    output, *rest = (o.name for o in session.get_outputs())
    got = session.run(None, raw(new, session))
    np.testing.assert_allclose(got[0], expected, atol=1e-5 * scale)
    if not regression:
        assert (output, rest) == ("probabilities", ["prediction"])
        assert list(got[1]) == [row["prediction"] for row in answer("predict", "r", "new.csv", "--client", "B")]
    about = session.get_modelmeta().custom_metadata_map
    assert (about["client"], json.loads(about["classes"])) == ("B", [] if regression else ["ill", "well"])


def test_a_small_cnn_and_all_clients(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    fed = ft.Federation.load("digits", clients=2, images=True)
    run = ft.run(ft.FedAvgFT(lr=0.05), fed, "cnn3:3,4,5", rounds=1, batch_size=64, out="r")
    record = answer("export", "r", "--onnx", "--all", "--to", "all")
    assert record["difference"] <= 1e-5
    for name, file in json.loads(Path("all/index.json").read_text()).items():
        session = onnxruntime.InferenceSession(Path("all") / file)
        x = fed.test.client(fed.index(name))[0][:50]
        got = session.run(["probabilities"], {"x": x.numpy()})[0]
        np.testing.assert_allclose(got, run.predict(name, x).softmax(1).numpy(), atol=1e-5)


def test_what_cannot_be_written_is_refused_by_name(monkeypatch):
    done(
        "run", "fedavg", "digits", "--with", "images=true", "--clients", "2", "--model", "resnet8", "--rounds", "1", "--out", "r"
    )
    assert "ResNet" in refusal("export", "r", "--onnx")
    done("run", "knnper", "digits", "--clients", "2", "--model", "mlp:4", "--lr", "0.001", "--rounds", "1", "--out", "k")
    assert "does not predict with a single model" in refusal("export", "k", "--onnx", "--client", "0")
    assert not Path("model.onnx").exists()
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    assert "install fedtailor[onnx]" in refusal("export", "k", "--onnx")


def test_a_file_whose_answers_are_others_is_not_written():
    pytest.importorskip("onnxruntime")
    table().to_csv("t.csv", index=False)
    done("run", "local", "t.csv", *COLUMNS, "--rounds", "2", "--out", "r")
    saved = models.read(Path("r"))
    with pytest.raises(ft.errors.ModelMismatch, match="off the run's own predictions"):
        onnx_graph.check(onnx_graph.onnx_of(saved, "A"), saved, "B")
