"""The gallery of own pieces runs, and so does every example and command of its page."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own.md").read_text()
SCRIPTS = sorted(path for path in (ROOT / "examples" / "own").glob("*.py") if path.name != "made.py")
SHOWS = {  # what a script says if its piece works
    "network": "deep: keeps every promise",
    "different_networks": "refused: FedAvg sends models",
    "optimizers": "refused: TorchOptimizer: LBFGS",
    "callbacks": "validation is flat",
    "datasets": "'site 5'",
    "attendance": "[1, 2, 1, 2]",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in ("made", "mine"):
        if name not in before:
            sys.modules.pop(name, None)


def test_the_gallery_has_ten_pieces_and_the_page_names_each():
    assert len(SCRIPTS) >= 10
    assert all(f"examples/own/{path.name}" in PAGE for path in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_every_script_runs(script, folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    assert SHOWS.get(script.stem, "") in capsys.readouterr().out
    assert not list(folder.iterdir())


def test_every_example_and_command_of_the_page_works(folder, monkeypatch, capsys):
    blocks = re.findall(r"```(python|sh)\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.syspath_prepend(folder)
    shape = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    save_file(shape.state_dict(), "fourth.safetensors")
    Path("examples").symlink_to(ROOT / "examples")
    names: dict[str, object] = {}
    for kind, text in blocks:
        if text.startswith("# mine.py"):
            Path("mine.py").write_text(text)
        elif kind == "python":
            exec(compile(text, "own.md", "exec"), names)
        for line in text.splitlines() if kind == "sh" else ():
            result = CliRunner().invoke(app, shlex.split(line)[1:])
            assert result.exit_code == 0, (line, result.output)


DEVICES = (ROOT / "docs" / "devices.md").read_text()


def test_every_example_and_command_of_the_page_on_devices_works(folder):
    """A GPU is refused by name where there is none; the run that goes on was then begun on the CPU."""
    python, commands = re.search(r"```python\n(.*?)```\n```\n(.*?)```", DEVICES, re.DOTALL).groups()
    draw = np.random.default_rng(0)
    rows = [(draw.normal(size=(8, 1, 8, 8)), np.arange(8) % 2) for _ in range(2)]
    federation = ft.Federation.from_arrays(rows, rows)
    exec(compile(python, "devices.md", "exec"), {"ft": ft, "federation": federation})
    begin, go_on = (shlex.split(line, comments=True)[1:] for line in commands.splitlines())
    small = ["--rounds", "1", "--clients", "3"]
    if torch.cuda.device_count() < 2:
        result = CliRunner().invoke(app, [*begin, *small])
        assert result.exit_code == 2
        assert "cuda:1" in result.output
        begin = ["cpu" if word == "cuda:1" else word for word in begin]
    assert CliRunner().invoke(app, [*begin, *small]).exit_code == 0
    result = CliRunner().invoke(app, go_on)
    assert result.exit_code == 0, result.output
