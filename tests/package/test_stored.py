"""Numbers and run directories of an earlier version still hold (tests/stored)."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.cli import main
from fedtailor.runs import folder, models
from tests.stored import make

SUMMARIES = json.loads((make.HERE / "summaries.json").read_text())
RUNS = make.HERE / "runs"
NUMBER = re.compile(r"\d+\.\d+(?:e[-+]?\d+)?")


# Of linear models the mean of the logits is the logits of the mean: the student has nothing to learn, its gradient is rounding,
# which Adam divides by its own size. These numbers are the machine's from the fourth digit behind the point on.
ROUNDING = ("FedDF linear", "PerAda linear")


def alike(now, then, where):
    if isinstance(then, dict):
        for key in then:
            alike(now[key], then[key], f"{where} {key}")
    elif isinstance(then, list):
        assert len(now) == len(then), where
        for i, (one, other) in enumerate(zip(now, then, strict=True)):
            alike(one, other, f"{where} {i}")
    elif isinstance(then, float):
        limits = {"rel": 1e-3, "abs": 1e-4} if where.startswith(ROUNDING) else {"rel": 1e-9, "abs": 1e-12}
        assert now == pytest.approx(then, **limits), where
    elif isinstance(then, str):  # settings by a theory name numbers, whose last digit is the machine's
        assert NUMBER.sub("#", now) == NUMBER.sub("#", then), where
        alike([float(number) for number in NUMBER.findall(now)], [float(number) for number in NUMBER.findall(then)], where)
    else:
        assert now == then, where


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_summary_is_what_it_was(name):
    alike(json.loads(json.dumps(make.summary(make.cases()[name]))), SUMMARIES[name], name)


@pytest.mark.parametrize("name", ["ditto", "flow", "fedavg"])
def test_models_written_before_predict_as_they_did(name):
    with pytest.warns(UserWarning, match="no digests"):
        saved = models.read(RUNS / name)
    x = np.random.default_rng(1).normal(size=(3, *saved.facts["shape"]))
    for client, logits in json.loads((RUNS / "predictions.json").read_text())[name].items():
        output = saved.predict(None if client == "new" else client, x)
        assert np.allclose(output.numpy(), logits, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["ditto", "flow", "fedavg", "compare"])
def test_directories_written_before_are_reported(name):
    with pytest.warns(UserWarning, match="no digests") as notes:
        records = folder.read(RUNS / name)
    assert len(notes) == 1
    assert all(record.summary["rounds"] for runs in records.values() for record in runs)


def test_a_run_stopped_before_goes_on_and_ends_as_it_would_have(tmp_path):
    shutil.copytree(RUNS / "stopped", tmp_path / "run")
    data = ft.Federation.load("examples/patients.csv", client="hospital", label="outcome")
    options = {"rounds": 6, "batch_size": 16, "seed": 2, "engine": "loop", "workers": 1, "dtype": "float64", "cohort": 0.5}
    done = ft.run(ft.FedCLUP(lam=0.3, lr=0.2), data, "linear", out=tmp_path / "run", resume=True, **options)
    alike(json.loads(json.dumps(dict(done.summary))), json.loads((RUNS / "stopped.json").read_text()), "stopped")


@pytest.mark.parametrize("name", ["ditto", "compare"])
def test_a_finished_one_is_read_back_by_resume(name, tmp_path, monkeypatch, capsys):
    shutil.copytree(RUNS / name, tmp_path / "run")
    for path in (tmp_path / "run").rglob("config.toml"):
        path.write_text(path.read_text().replace("PATIENTS", str(Path("examples/patients.csv").resolve())))
    monkeypatch.setattr("sys.argv", ["fedtailor", "resume", str(tmp_path / "run"), "--json"])
    with warnings.catch_warnings(action="default"), pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    printed = capsys.readouterr()
    assert Path(json.loads(printed.out)["out"]) == tmp_path / "run"
    assert "carries no digests" in printed.err
