"""A comparison as a paper shows it: its table in three forms, and its pictures as files."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fedtailor.cli import app

COMPARE = ("compare", "digits", "--clients", "3", "--methods", "local,fedavg", "--rounds", "1", "--yardsticks", "none")


def call(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("paper") / "compared"
    table = call(*COMPARE, "--latex", "--out", where).stdout
    assert table.startswith(r"\begin{tabular}{lcc}")
    assert r"{\boldmath$" in table
    return where


@pytest.mark.parametrize(
    ("form", "first"), [("--markdown", "| method | personal accuracy |"), ("--csv", "method,personal accuracy,")]
)
def test_a_table_is_all_that_stdout_has(form, first, tmp_path):
    lines = call(*COMPARE, form, "--out", tmp_path / "compared").stdout.splitlines()
    assert lines[0].startswith(first)
    assert not any("report is in" in line for line in lines)


def test_two_forms_at_once_are_refused(tmp_path):
    for other in ("--csv", "--json"):
        said = call(*COMPARE, "--latex", other, "--out", tmp_path / "compared", code=2).stderr
        assert "give one of them" in said
    assert not (tmp_path / "compared").exists()


def test_a_report_gives_its_pictures_as_files(folder, tmp_path):
    pytest.importorskip("vl_convert")
    said = json.loads(call("report", folder, "--figures", tmp_path / "figures", "--json").stdout)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {name.rpartition("/")[2] for name in said["figures"]}
    assert {name.rpartition(".")[2] for name in said["figures"]} == {"svg", "pdf"}
