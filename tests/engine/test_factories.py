"""Functions that make the model, so that seeds differ in their start; and starts from files and state dicts."""

from __future__ import annotations

import json
import tomllib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.algorithms import origin
from fedtailor.cli import app
from fedtailor.engine import start
from fedtailor.errors import BadRun, InvalidArgument, InvalidData, ModelMismatch
from tests.make import federation, seeded

DATA = federation((7, 5, 9, 6))
SETTINGS = {"rounds": 1, "workers": 1, "engine": "loop", "evaluate_every": 0}
SOURCE = """
from torch import nn


def net(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1], 5), nn.Tanh(), nn.Linear(5, outputs))
"""


def small(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 4), nn.Tanh(), nn.Linear(4, outputs))


def start_of(run):
    """The model before training: a step of nothing."""
    return run.shared["model"]


def test_seeds_differ_in_the_start_that_a_factory_makes_and_the_caller_keeps_its_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, two, again = (start_of(ft.run(ft.FedAvg(lr=1e-30), DATA, small, seed=seed, **SETTINGS)) for seed in (1, 2, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one["0.weight"], again["0.weight"])
    assert not torch.equal(one["0.weight"], two["0.weight"])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        by_hand = small((3,), 2)
    assert torch.equal(one["0.weight"], by_hand[0].weight.detach())


def test_a_module_starts_the_same_in_every_seed():
    module = seeded(small, (3,), 2)
    one, two = (start_of(ft.run(ft.FedAvg(lr=1e-30), DATA, module, seed=seed, **SETTINGS)) for seed in (1, 2))
    assert torch.equal(one["0.weight"], two["0.weight"])


def test_a_comparison_makes_a_model_for_every_seed():
    both = ft.compare([ft.FedAvg(lr=1e-30)], DATA, small, seeds=2, **SETTINGS)
    one, two = (run.shared["model"]["0.weight"] for run in both.all["FedAvg"])
    assert not torch.equal(one, two)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (lambda: 3, "let it return a torch.nn.Module"),
        (lambda width: nn.Linear(3, 2), "asks for 'width'"),
        (lambda: nn.Linear(3, "two"), "cannot be made"),
    ],
)
def test_a_factory_that_makes_no_module_is_refused(factory, says):
    with pytest.raises(InvalidArgument, match=says):
        ft.run(ft.FedAvg(), DATA, factory, **SETTINGS)


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine.py"


def command(*words, code=0):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def test_a_factory_on_the_command_line_trains_predicts_and_is_refused_once_it_has_changed(source, tmp_path):
    flags = ("--with", "images=true", "--model", "mine.py:net", "--rounds", "2", "--clients", "3")
    command("run", "ditto", "digits", *flags, "--out", "done")
    assert tomllib.loads((tmp_path / "done/config.toml").read_text())["model"].startswith("mine.py:net@")
    assert json.loads((tmp_path / "done/summary.json").read_text())["model"].startswith("net@")
    command("export", "done", "--client", "1", "--to", "one.safetensors")
    command("resume", "done")
    saved = __import__("fedtailor.runs.models", fromlist=["read"]).read(tmp_path / "done")
    fed = ft.Federation.load("digits", clients=3, images=True)
    here = ft.run(ft.Ditto(), fed, "mine.py:net", rounds=2, batch_size=32)
    x = fed.test.client(1)[0]
    np.testing.assert_allclose(saved.predict("1", x), here.predict(1, x), atol=1e-5)
    source.write_text(SOURCE.replace("5", "6"))
    origin._functions.clear()  # as in a new process
    assert "now holds another net" in " ".join(command("resume", "done", code=2).split())
    assert "now holds another net" in " ".join(command("export", "done", code=2).split())


def test_a_run_starts_from_a_state_dict_or_a_file(tmp_path):
    module, other = seeded(small, (3,), 2), small((3,), 2)
    torch.save(other.state_dict(), tmp_path / "other.pt")
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    for where in (other.state_dict(), tmp_path / "other.pt", str(tmp_path / "other.safetensors")):
        begun = start_of(ft.run(ft.FedAvg(lr=1e-30), DATA, module, start=where, **SETTINGS))
        assert all(torch.equal(begun[name], value) for name, value in other.state_dict().items())


def test_statistics_are_part_of_a_start_and_counts_are_not():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    state = {**module.state_dict(), "1.running_mean": torch.arange(4.0)}
    task = ft.Task.from_module(module)
    begun = start.started(task, start.in_words(state)).init()
    assert torch.equal(begun["buffer:1.running_mean"], torch.arange(4.0))


def test_a_start_that_does_not_fit_says_so(tmp_path):
    with pytest.raises(ModelMismatch, match=r"differs in 0.weight: .*\(4, 3\).*\(5, 3\)"):
        ft.run(
            ft.FedAvg(), DATA, small, start=nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).state_dict(), **SETTINGS
        )
    with pytest.raises(ModelMismatch, match=r"differs in 2.bias"):
        ft.run(ft.FedAvg(), DATA, small, start=dict(list(small((3,), 2).state_dict().items())[:3]), **SETTINGS)
    frozen = small((3,), 2)
    frozen[0].requires_grad_(False)
    with pytest.raises(ModelMismatch, match=r"holds 0.weight, which is frozen"):
        ft.run(ft.FedAvg(), DATA, frozen, start=seeded(small, (3,), 2).state_dict(), **SETTINGS)
    with pytest.raises(InvalidArgument, match="start must be a run directory"):
        ft.run(ft.FedAvg(), DATA, small, start={"0.weight": 3}, **SETTINGS)
    with pytest.raises(InvalidData, match="no file of weights"):
        ft.run(ft.FedAvg(), DATA, small, start=tmp_path / "none.pt", **SETTINGS)


def test_a_state_dict_ties_a_run_to_python(tmp_path):
    state = small((3,), 2).state_dict()
    settings = {**SETTINGS, "start": state, "out": tmp_path / "run"}
    ft.run(ft.FedAvg(), DATA, small, **settings)
    ft.run(ft.FedAvg(), DATA, small, resume=True, **settings)
    start._states.clear()  # as in a new process
    kept = tomllib.loads((tmp_path / "run/config.toml").read_text())["start"]
    with pytest.raises(BadRun, match="give the same one again"):
        ft.run(ft.FedAvg(), DATA, small, resume=True, **{**settings, "start": kept})
