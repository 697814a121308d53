"""Names and labels are data: they steer no terminal, start no formula and break no export."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedtailor.cli import app, base
from fedtailor.cli.escape import file_names, printable, quoted_formulas

ESC, BELL, BIDI, C1 = "\x1b[31m", "\x07", "\u202e", "\x9b2J"
EVIL = (f"red{ESC}", f"bell{BELL}", f"turned{BIDI}txt", f"cleared{C1}")
LONG = "京都府立医科大学附属病院" * 20


def hostile(names, rows=12):
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"x": draw.normal(size=rows * len(names)), "hospital": np.repeat(names, rows)})
    frame["sick"] = np.where(frame.x + 0.1 * draw.normal(size=len(frame)) > 0, f"yes{ESC}", "=no()")
    return frame


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("escape")
    table = folder / "table.csv"
    hostile([*EVIL, "=SUM(A1)", "-5", "CON", "a/b", "Ann", "ann", LONG]).to_csv(table, index=False)
    columns = ("--client", "hospital", "--label", "sick", "--rounds", 1, "--evaluate-every", 0)
    result = call("run", table, "fedavg", *columns, "--out", folder / "run")
    assert result.exit_code == 0, result.stderr
    return table, folder / "run", result


def assert_harmless(text):
    assert not [c for c in text if ord(c) < 32 and c != "\n"]
    assert not set(text) & {BIDI, "\x9b", "\x7f"}


def test_control_characters_are_escaped_and_words_are_not():
    assert printable(f"a{ESC}b") == "a\\x1b[31mb"
    assert printable({"k\x07": ["x\u202e", 3]}) == {"k\\x07": ["x\\u202e", 3]}
    for word in ("Zürich", "京都　府", "👩\u200d🔬", "می\u200cد", "a b"):
        assert printable(word) == word


def test_what_a_command_says_holds_no_control_characters(trained):
    table, run, result = trained
    assert_harmless(result.stdout + result.stderr)
    assert "\\x1b[31m" in result.stderr  # the label is named, escaped
    assert_harmless(call("data", "describe", table, "--client", "hospital", "--label", "sick").stdout)
    assert_harmless(call("export", run, "--client", f"x{ESC}").stderr)


def test_an_error_and_a_note_hold_no_control_characters():
    printed = CliRunner().invoke(app, ["run", f"none{ESC}.csv"]).stderr
    assert printed.startswith("fedtailor: ")
    assert_harmless(printed)


def test_a_table_holds_no_control_characters(capsys):
    base.show([], [{f"name{ESC}": f"v{BELL}\rforged", "n": 1}], False)
    assert_harmless(capsys.readouterr().out)


def test_predictions_on_a_terminal_hold_no_control_characters(trained, monkeypatch, capsys):
    table, run, _ = trained
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit):
        app(["predict", str(run), str(table), "--raw"])
    shown = capsys.readouterr().out
    assert "red\\x1b[31m" in shown
    assert_harmless(shown)


def test_formulas_are_quoted_and_numbers_are_not(trained):
    table, run, _ = trained
    written = pd.read_csv(io.StringIO(call("predict", run, table).stdout), dtype=str)
    assert {"'=SUM(A1)", "-5"} <= set(written["hospital"])
    assert set(written["sick"]) == {f"yes{ESC}", "'=no()"}
    assert set(written["prediction"]) <= {f"yes{ESC}", "'=no()"}
    assert (pd.to_numeric(written["x"]) < 0).any()
    raw = pd.read_csv(io.StringIO(call("predict", run, table, "--raw").stdout), dtype=str)
    assert {"=SUM(A1)", "-5"} <= set(raw["hospital"])
    assert set(raw["sick"]) == {f"yes{ESC}", "=no()"}


def test_every_kind_of_column_survives_the_quoting():
    kinds = {"+a": ["=x", None, "-1.5e3"], "b": [1, 2, 3], "c": pd.Categorical(["@z", "y", "@z"]), "d": [True, False, True]}
    quoted = quoted_formulas(pd.DataFrame({**kinds, "e": ["\tq", "\rr", "-"]}))
    assert list(quoted.columns) == ["'+a", "b", "c", "d", "e"]
    assert quoted["'+a"].fillna("").tolist() == ["'=x", "", "-1.5e3"]
    assert quoted["c"].tolist() == ["'@z", "y", "'@z"]
    assert quoted["e"].tolist() == ["'\tq", "'\rr", "'-"]
    assert quoted["b"].dtype == int
    assert quoted["d"].dtype == bool


def test_all_models_are_exported_whatever_the_clients_are_called(trained, tmp_path):
    _, run, _ = trained
    result = call("export", run, "--all", "--to", tmp_path / "models")
    assert result.exit_code == 0, result.stderr
    index = json.loads((tmp_path / "models" / "index.json").read_text())
    assert set(index) == {*EVIL, "=SUM(A1)", "-5", "CON", "a/b", "Ann", "ann", LONG}
    assert len({file.lower() for file in index.values()}) == len(index)
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"index.json", *index.values()}
    assert all(len(file.encode()) <= 200 for file in index.values())
    assert all(load_file(tmp_path / "models" / file) for file in index.values())


def test_file_names_are_stable_and_apart():
    names = file_names(["a", "B b", LONG, LONG + "x", "", "\ud800"])
    assert names["a"] == "a"
    assert names["B b"] == "B b"
    assert names[LONG] == file_names([LONG])[LONG] != names[LONG + "x"]
    assert len(set(names.values())) == 6
