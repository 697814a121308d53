"""Every command and every line of Python in the README runs."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtailor.cli import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("fedtailor ")
]


def test_the_readme_shows_every_command():
    shown = {command[0] for command in COMMANDS}
    assert {"run", "compare", "resume", "report", "predict", "export", "data", "list"} <= shown


def test_every_command_of_the_readme_works(tmp_path, monkeypatch):
    """In order and in one directory, as a reader would type them (with fewer rounds)."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples" / "patients.csv", "patients.csv")
    for command in COMMANDS:
        quick = list(command)
        if quick[0] in ("run", "compare", "sweep"):
            quick = [*quick, "--rounds", "3"]
        result = CliRunner().invoke(app, quick)
        assert result.exit_code == 0, (quick, result.output)
    assert Path("predictions.csv").read_text().count("\n") == 901
    assert Path("cork.safetensors").stat().st_size > 0
    assert Path("runs/patients-compare/report.html").exists()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_the_python_of_the_readme_works(block, tmp_path, monkeypatch):
    """As it stands (with fewer rounds)."""
    monkeypatch.chdir(tmp_path)
    exec(compile(re.sub(r"rounds=\d+", "rounds=3", block), "README.md", "exec"), {"__name__": "readme"})
