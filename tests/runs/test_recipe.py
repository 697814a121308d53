"""A run directory says how to make its data again, or that nothing makes them and what they were."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli import app
from fedtailor.data.shift import corrupt
from fedtailor.errors import BadRun
from fedtailor.runs.config import fingerprint

DATA = ft.Federation.load("clup-logistic", clients=6)
SETTINGS = {"rounds": 2, "engine": "loop", "workers": 1}
OTHERS = {
    "some clients": lambda: DATA.take([0, 2, 3]),
    "another order": lambda: DATA.take([1, 0, 2, 3, 4, 5]),
    "facts": lambda: DATA.with_facts(lam=np.arange(6) + 1.0),
}


def config_of(folder):
    return tomllib.loads((folder / "config.toml").read_text())


def test_a_federation_that_can_be_made_again_says_how(tmp_path):
    assert DATA.take(range(6)).recipe == DATA.recipe == {"data": "clup-logistic", "clients": 6}
    assert DATA.with_facts().recipe == DATA.recipe
    ft.run(ft.FedAvg(), DATA, out=tmp_path / "run", **SETTINGS)
    written = config_of(tmp_path / "run")
    assert (written["data"], written["clients"]) == ("clup-logistic", 6)
    assert "data_sha256" not in written


@pytest.mark.parametrize("kind", OTHERS)
def test_a_federation_made_from_another_has_no_recipe_and_is_known_by_its_rows(tmp_path, kind):
    other = OTHERS[kind]()
    assert other.recipe is None
    folder = tmp_path / "run"
    run = ft.run(ft.FedAvg(), other, out=folder, **SETTINGS)
    written = config_of(folder)
    assert "data" not in written
    assert "clients" not in written
    assert written["data_sha256"] == fingerprint(run.federation)
    said = CliRunner().invoke(app, ["resume", str(folder)])
    assert said.exit_code == 2
    assert "a federation that no command makes" in " ".join(said.output.split())
    again = ft.run(ft.FedAvg(), OTHERS[kind](), out=folder, resume=True, **SETTINGS)
    assert again.summary == run.summary
    with pytest.raises(BadRun, match="other data"):
        ft.run(ft.FedAvg(), DATA, out=folder, resume=True, **SETTINGS)


def test_corrupted_images_have_no_recipe():
    images = replace(DATA, test=replace(DATA.test, x=torch.rand(len(DATA.test.y), 8, 8)))
    assert images.recipe is not None
    assert corrupt(images, "contrast", 3).recipe is None
