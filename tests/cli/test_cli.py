"""The command line as its users meet it: words in, one answer or one line of refusal out, and nothing half-written."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.algorithms import METHODS
from fedtailor.cli import app
from fedtailor.cli.train import new_folder
from fedtailor.config import CompareSettings, DataSettings, RunSettings
from fedtailor.engine.checked import names
from fedtailor.errors import FedtailorError
from fedtailor.runs import models
from tests import make
from tests.commands import Command, appears

COLUMNS = ("--client", "hospital", "--label", "sick")
QUICK = ("--rounds", "2", "--evaluate-every", "0")


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def done(*words):
    """The result of a command that succeeds."""
    result = call(*words)
    assert result.exit_code == 0, result.stderr + repr(result.exception)
    return result


def strictly(text):
    """JSON by the standard, which knows no NaN."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def answer(*words):
    return strictly(done(*words, "--json").stdout)


def files_in(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in Path(folder).rglob("*")}


def refusal(*words):
    """The last line of stderr of a command that is refused and leaves the directory as it was."""
    before = files_in(".")
    result = call(*words)
    assert result.exit_code == 2, result.stdout + repr(result.exception)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert files_in(".") == before
    lines = result.stderr.splitlines()
    assert all(line.startswith("fedtailor: ") for line in lines), result.stderr
    return lines[-1]


def hospitals(rows=60, seed=0):
    """Three hospitals that differ a little; a number, a number with gaps and a category."""
    draw = np.random.default_rng(seed)
    tables = []
    for i in range(3):
        x, age = draw.normal(size=rows), draw.normal(50, 10, rows)
        sick = np.where(x + 0.5 * draw.normal(size=rows) > 0.3 * i, "yes", "no")
        age[:: 7 + i] = np.nan
        tables.append(
            pd.DataFrame({"hospital": f"H{i}", "x": x, "age": age, "ward": draw.choice(["a", "b", "c"], rows), "sick": sick})
        )
    return pd.concat(tables, ignore_index=True)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def table(here):
    hospitals().to_csv("patients.csv", index=False)
    return Path("patients.csv")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run on a table, from Python, and its directory."""
    folder = tmp_path_factory.mktemp("trained")
    hospitals().to_csv(folder / "patients.csv", index=False)
    federation = ft.Federation.load(str(folder / "patients.csv"), client="hospital", label="sick", standardize="client")
    run = ft.run(ft.Ditto(lam=0.3), federation, rounds=3, batch_size=16, out=folder / "run")
    return run, folder / "run"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    result = call("compare", "digits", "--clients", 4, "--methods", "local,fedavg", *QUICK, "--out", folder / "all", "--json")
    assert result.exit_code == 0
    return strictly(result.stdout), folder / "all"


def assert_same_run(a, b):
    """Bit for bit, but for the time."""
    assert (a / "history.jsonl").read_bytes() == (b / "history.jsonl").read_bytes()
    for name in ("shared.safetensors", "personal.safetensors"):
        assert (a / "models" / name).read_bytes() == (b / "models" / name).read_bytes()
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (a, b))
    assert {**one, "seconds": 0} == {**other, "seconds": 0}


def assert_same_comparison(a, b):
    runs = sorted(path.parent.relative_to(a) for path in a.glob("runs/*/*/config.toml"))
    assert runs
    assert runs == sorted(path.parent.relative_to(b) for path in b.glob("runs/*/*/config.toml"))
    for run in runs:
        assert_same_run(a / run, b / run)
    assert files_at(a / "tuning") == files_at(b / "tuning")
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (a, b))
    for summary in (one, other):
        summary["tuning_seconds"] = dict.fromkeys(summary["tuning_seconds"])
        for row in summary["table"]:
            row["seconds"] = row["tuning_seconds"] = 0
    assert one == other


def files_at(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*")}


# -- one document on stdout ----------------------------------------------------------------------------------------------


def test_run_answers_in_one_json_document():
    summary = answer("run", "digits", "--clients", 4, *QUICK)
    assert summary["algorithm"] == "FedCLUP"
    assert summary["clients"] == 4
    assert summary["rounds"] == 2
    assert summary["out"] == "runs/digits-fedclup"
    stored = json.loads(Path("runs/digits-fedclup/summary.json").read_text())
    assert {key: value for key, value in summary.items() if key not in ("out", "verdict")} == stored


def test_summary_has_everything_the_design_promises():
    summary = answer("run", "digits", "--clients", 4, *QUICK)
    promised = "algorithm dataset clients rounds seed engine seconds acc_personal acc_global acc_global_test share_benefit"
    promised += " worst_decile both_correct global_only personal_only bytes_down bytes_up trained_parameters"
    assert set((promised + " personal_parameters epsilon").split()) <= set(summary)


def test_compare_answers_in_one_json_document(compared):
    comparison, folder = compared
    assert [row["method"] for row in comparison["methods"]] == ["Local", "FedAvg"]
    assert comparison["best"] in ("Local", "FedAvg")
    assert comparison["out"] == str(folder)


def test_resume_report_and_export_answer_in_one_json_document(trained):
    run, folder = trained
    assert answer("resume", folder)["acc_personal"] == run.summary["acc_personal"]
    assert answer("report", folder, "--to", "page.html")["report"] == "page.html"
    assert answer("export", folder, "--client", "H1") == {"written": ["model.safetensors"]}


def test_predict_answers_in_one_json_document(trained, table):
    predictions = answer("predict", trained[1], table)
    assert len(predictions) == 180
    assert {"hospital", "x", "age", "ward", "prediction", "probability no", "probability yes"} <= set(predictions[0])


@pytest.mark.parametrize("what", ["models", "data"])
def test_every_list_answers_in_one_json_document(what):
    rows = answer("list", what)
    assert len(rows) > 3
    assert all(row["name"] for row in rows)


def test_data_commands_answer_in_one_json_document(monkeypatch):
    assert answer("data", "list") == answer("list", "data")
    assert answer("data", "describe", "digits", "--clients", 5)
    monkeypatch.setattr("fedtailor.data.readers.fetch.get", lambda name, place: Path("somewhere") / name)
    assert answer("data", "get", "usps") == {"name": "usps", "path": "somewhere/usps"}


def test_data_describe_takes_every_flag_that_says_how_data_are_read(table):
    frame = pd.read_csv(table)
    frame["part"] = ["test" if row % 4 == 0 else "train" for row in range(len(frame))]
    frame.to_csv("parted.csv", index=False)
    assert answer("data", "describe", "parted.csv", *COLUMNS)["shape"][0] > 1
    assert answer("data", "describe", "parted.csv", *COLUMNS, "--drop", "age,ward,part")["shape"] == [1]
    assert answer("data", "describe", "parted.csv", *COLUMNS, "--features", "x")["shape"] == [1]
    parted = answer("data", "describe", "parted.csv", *COLUMNS, "--split", "part")
    assert parted["rows"] == {"train": 135, "test": 45}
    helped = done("data", "describe", "--help").stdout
    assert all(f"--{flag.replace('_', '-')}" in helped for flag in names(DataSettings) if flag != "data")


def test_a_folder_that_is_called_like_a_data_set_does_not_confuse_the_task():
    Path("digits").mkdir()
    Path("digits/anna.txt").write_text("once upon a time there was a test " * 8)
    done("run", "local", "digits", "--clients", 3, *QUICK, "--task", "classification")
    assert answer("data", "describe", "digits", "--clients", 3, "--task", "classification")["shape"] == [64]
    assert answer("data", "describe", "./digits", "--with", "length=5", "--task", "classification")["shape"] == [5]


def test_a_task_is_not_lost_where_the_reader_has_no_such_option():
    assert answer("data", "describe", "digits", "--clients", 3, "--task", "regression")["kind"] == "regression"


def test_nothing_is_said_on_stderr_where_nothing_was_assumed_and_nobody_watches():
    assert done("run", "digits", "--clients", 4, *QUICK).stderr == ""
    assert done("compare", "digits", "--clients", 4, "--methods", "local,fedavg", *QUICK).stderr == ""


def test_what_was_assumed_about_a_table_is_said_on_stderr_only(table):
    result = done("run", table, *COLUMNS, *QUICK, "--json")
    strictly(result.stdout)
    assert "fedtailor: 180 rows of 3 clients." in result.stderr
    assert all(line.startswith("fedtailor: ") for line in result.stderr.splitlines())


# -- refusals ------------------------------------------------------------------------------------------------------------

REFUSED = [
    (("run", "digits", "--method", "fedclpu"), "unknown method 'fedclpu'; did you mean 'fedclup'?"),
    (("run", "fedavgg", "digits"), "unknown method 'fedavgg'; did you mean 'fedavg'?"),
    (("run", "digits", "fedavgg"), "unknown method 'fedavgg'; did you mean 'fedavg'?"),
    (("run", "digits", "--method", "xyz"), "the methods are local, fedadam, fedavg"),
    (("run", "digts"), "unknown data set 'digts'; did you mean 'digits'?"),
    (("run", "zzzz"), "the data sets are digits"),
    (("run", "a" * 300), "cannot be read"),
    (("run", "no/such.csv"), "there is no file"),
    (("run", "digits", "--model", "linaer"), "unknown model 'linaer'; did you mean 'linear'?"),
    (("run", "digits", "--roundz", "3"), "unknown flag --roundz; did you mean 'rounds'?"),
    (("run", "digits", "--verbose"), "unknown flag --verbose"),
    (("run", "digits", "--lr"), "--lr needs a value"),
    (("run", "digits", "--lr", "--seed", "1"), "--lr needs a value"),
    (("run",), "no data given"),
    (("compare",), "no data given"),
    (("compare", "fedavg", "digits"), "cannot make sense of 'fedavg digits'"),
    (("run", "one", "two", "three"), "cannot make sense of 'one two three'"),
    (("run", "digits", "--lam", "-1"), "lam must be at least 0, not -1"),
    (("run", "digits", "--lam", "nan"), "lam must be"),
    (("run", "digits", "--lam", "[" * 3000), "lam must be"),
    (("run", "digits", "--lam", "1" * 5000), "lam must be"),
    (("run", "digits", "--lr", "0"), "lr must be greater than 0, not 0"),
    (("run", "digits", "--lr", "-0.1"), "lr must be greater than 0, not -0.1"),
    (("run", "digits", "--lr", "fast"), "lr must be a number, not 'fast'"),
    (("run", "digits", "--rounds", "0"), "rounds must be greater than or equal to 1, not 0"),
    (("run", "digits", "--cohort", "inf"), "cohort must be a finite number"),
    (("run", "digits", "--cohort", "-1"), "cohort must be greater than 0"),
    (("run", "digits", "--seed", "1" + "0" * 25), "seed must be less than"),
    (("run", "digits", "--seed", "-1"), "seed must be greater than or equal to 0"),
    (("run", "digits", "--engine", "turbo"), "engine must be 'auto', 'loop', 'vectorized', 'flower' or 'ray', not 'turbo'"),
    (("run", "digits", "--clients", "5000"), "ask for at most"),
    (("run", "digits", "--partition", "dirichet:0.3"), "dirichet"),
    (("run", "digits", "--label", "sick"), "no option 'label'"),
    (("run", "digits", "--set", "lam"), "--set must look like NAME=VALUE, not 'lam'"),
    (("run", "digits", "--set", "=3"), "--set must look like NAME=VALUE"),
    (("run", "digits", "--set", "lambda=3"), "has no setting 'lambda'; did you mean 'lam'?"),
    (("run", "digits", "--with", "colour=red"), "no option 'colour'"),
    (("run", "digits", "--method", "fedper"), "FedPer: personal='head' leaves no shared parameters"),
    (("run", "digits", "--method", "fedper", "--save-config", "kept/c.toml", "--lr", "0"), "lr must be"),
    (("run", "digits", "--tune"), "unknown flag --tune"),
    (("compare", "digits", "--methods", "local,fedper"), "FedPer: personal='head' leaves no shared parameters"),
    (("compare", "digits", "--methods", "local,feddf"), "FedDF needs public rows"),
    (("compare", "digits", "--methods", "fedavg,FedAvg"), "given twice"),
    (("compare", "digits", "--methods", "fedavg,nope"), "unknown method 'nope'"),
    (("compare", "digits", "--methods", ","), "methods"),
    (("compare", "digits", "--tune", "--val-share", "0"), "tuning needs validation rows"),
    (("compare", "digits", "--tune", "--grid", "lr"), "--grid must look like NAME=VALUE"),
    (("compare", "digits", "--tune", "--grid", "lr=-1"), "lr must be greater than 0"),
    (("compare", "digits", "--tune", "--grid", "foo=1"), "none of the methods has the grid's 'foo'"),
    (("compare", "digits", "--tune", "--grid", "epochs=1,2"), "has a number for the grid's 'epochs'"),
    (("compare", "digits", "--tune", "--grid", "lr=red"), "grid.lr.0 must be a valid number"),
    (("compare", "digits", "--seeds", "0"), "seeds must be greater than or equal to 1"),
    (("compare", "digits", "--set", "fedclup=3", "--set", "fedclup.lam=1"), "fedclup a value and settings of its own"),
    (("compare", "digits", "--set", "fedclup.lam=1", "--set", "fedclup=3"), "fedclup a value and settings of its own"),
    (("compare", "digits", "--set", "ditto.lam=1", "--methods", "fedavg"), "'ditto', which is not among the methods"),
    (("compare", "digits", "--set", "lam=1", "--methods", "fedavg"), "none of the methods has a setting 'lam'"),
    (("data", "describe", "digts"), "did you mean 'digits'?"),
    (("data", "get", "digts"), "digts"),
    (("check", "nowhere.py:A"), "give a Python file and a class in it"),
    (("check", "A"), "one of your own is given as mine.py:MyMethod"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[" ".join(words)[:60] for words, _ in REFUSED])
def test_refused_in_one_line_that_says_why_with_nothing_written(words, says):
    more = ("--out", "new") if words[0] in ("run", "compare") else ()
    message = refusal(*words, *more)
    assert says in message
    assert refusal(*words, *more, "--json") == message


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "digits", "--rounds", "abc"), "--rounds"),
        (("run", "digits", "--rounds", "1.5"), "--rounds"),
        (("run", "digits", "--out"), "--out"),
        (("data", "describe", "digits", "--clients", "0"), "clients must be greater than or equal to 1, not 0"),
        (("resume",), "RUN"),
        (("nonsense",), "nonsense"),
    ],
)
def test_a_slip_in_the_flags_is_explained_without_a_traceback(words, says):
    before = files_in(".")
    result = call(*words)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert files_in(".") == before


def test_a_table_without_its_columns_is_refused_with_those_it_has(table):
    assert "label" in refusal("run", table, "--client", "hospital")
    assert "client" in refusal("run", table, "--label", "sick")
    assert "did you mean 'hospital'?" in refusal("run", table, "--client", "hospitl", "--label", "sick")
    for wrong in (("--client", "zzz", "--label", "sick"), ("--client", "hospital", "--label", "zzz")):
        message = refusal("run", table, *wrong)
        assert all(column in message for column in ("hospital", "x", "age", "ward", "sick"))


@pytest.mark.parametrize(
    "content", [b"", b"\n", bytes(range(256)) * 9, b"hospital,sick\n", b"PK\x03\x04" + b"\0" * 99, b"\xff\xfea"]
)
def test_a_file_that_is_no_table_is_refused(content):
    Path("junk.csv").write_bytes(content)
    assert "junk.csv" in refusal("run", "junk.csv", *COLUMNS, "--out", "new")


def test_one_class_everywhere_is_refused():
    hospitals().assign(sick="no").to_csv("one.csv", index=False)
    assert "'no' in every row" in refusal("run", "one.csv", *COLUMNS, "--out", "new")


def test_a_client_with_too_few_rows_is_named_and_min_samples_leaves_it_out():
    whole = hospitals()
    pd.concat([whole[whole.hospital != "H2"], whole[whole.hospital == "H2"].head(2)]).to_csv("few.csv", index=False)
    message = refusal("run", "few.csv", *COLUMNS, "--out", "new")
    assert "'H2'" in message
    assert "--min-samples" in message
    result = done("run", "few.csv", *COLUMNS, "--min-samples", 10, *QUICK, "--json")
    assert "were left out: 'H2'" in result.stderr
    assert strictly(result.stdout)["clients"] == 2


def test_a_directory_that_holds_another_run_is_refused(trained, compared):
    for folder in (trained[1], compared[1]):
        before = files_in(folder)
        assert "holds another run" in refusal("run", "digits", "--out", folder)
        assert "holds another run" in refusal("compare", "digits", "--methods", "local", "--out", folder)
        assert files_in(folder) == before


@pytest.mark.parametrize("command", ["resume", "report", "export", "predict"])
def test_what_is_no_run_directory_is_refused(command, table):
    rows = [table] if command == "predict" else []
    Path("empty").mkdir()
    for where in ("empty", "missing", "patients.csv"):
        assert where in refusal(command, where, *rows)


@pytest.mark.parametrize("command", ["resume", "report", "export", "predict"])
def test_a_run_of_a_newer_version_is_refused(command, table):
    done("run", table, *COLUMNS, *QUICK, "--out", "mine")
    config = Path("mine/config.toml")
    config.write_text(config.read_text().replace("format = 3\n", "format = 4\n").replace('version = "', 'version = "9'))
    message = refusal(command, "mine", *([table] if command == "predict" else []))
    assert "newer than this" in message
    assert "upgrade" in message


@pytest.mark.parametrize("command", ["report", "export", "predict"])
@pytest.mark.parametrize("kind", ["run", "compare"])
def test_an_unfinished_run_is_refused_and_resume_is_named(command, kind, table):
    more = ("--methods", "local,fedavg") if kind == "compare" else ()
    done(kind, table, *COLUMNS, *QUICK, *more, "--out", "mine")
    for name in ("manifest.json", "summary.json", "models/models.json"):
        Path("mine", name).unlink(missing_ok=True)
    message = refusal(command, "mine", *([table] if command == "predict" else []))
    assert "fedtailor resume mine" in message


def test_debug_shows_the_traceback():
    result = call("--debug", "run", "digits", "--lr", "0")
    assert isinstance(result.exception, FedtailorError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Mine(:", "SyntaxError"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
        ("raise SystemError('lost\\nfor words')", "lost for words"),
        ("other = 1", "has no class 'Mine'"),
        ("class Mine: pass", "needs an Algorithm"),
        ("import fedtailor as ft\nclass Mine(ft.FedAvg):\n    def __init__(self, x): pass", "give every setting a default"),
    ],
)
def test_a_method_that_cannot_be_loaded_is_refused_in_one_line(text, says, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    Path("mine.py").write_text(text)
    assert says in refusal("check", "mine.py:Mine")


# -- words and flags -----------------------------------------------------------------------------------------------------


def config_of(folder):
    return tomllib.loads((Path(folder) / "config.toml").read_text())


@pytest.mark.parametrize(
    "words",
    [
        ("digits",),
        ("fedclup", "digits"),
        ("digits", "fedclup"),
        ("digits", "--method", "fedclup"),
        ("FedCLUP", "digits"),
        ("digits", "--method", "FED-clup"),
        ("--method", "fed_clup", "digits"),
    ],
    ids=" ".join,
)
def test_method_and_data_may_be_named_in_any_order_and_spelling(words):
    done("run", *words, "--clients", 4, *QUICK, "--out", "mine")
    config = config_of("mine")
    assert config["method"] == "fedclup"
    assert config["data"] == "digits"


@pytest.mark.parametrize("name", ["fedprox-personal", "FedProxPersonal", "fedproxpersonal", "fedprox_personal"])
def test_dashes_in_a_method_name_do_not_matter(name):
    assert answer("run", name, "digits", "--clients", 4, *QUICK)["algorithm"] == "FedProxPersonal"


def test_a_setting_is_the_same_as_a_flag_as_set_and_from_a_file():
    Path("mine.toml").write_text('data = "digits"\n[set]\nlam = 0.7\nserver_lr = 0.9\n')
    ways = {
        "flag": ("digits", "--lam", "0.7", "--server-lr", "0.9"),
        "equals": ("--lam=0.7", "digits", "--server_lr=0.9"),
        "set": ("digits", "--set", "lam=0.7", "--set", "server-lr=0.9"),
        "file": ("--config", "mine.toml"),
    }
    for name, words in ways.items():
        done("run", *words, "--clients", 4, *QUICK, "--out", name)
        assert config_of(name)["set"] == {"lam": 0.7, "server_lr": 0.9}
        assert_same_run(Path("flag"), Path(name))


def test_in_a_comparison_a_setting_goes_to_all_that_have_it_or_to_the_one_named():
    words = ("--methods", "fedavg,fedclup,ditto", "--lr", "0.3", "--lam", "0.2", "--set", "FedCLUP.lam=0.7")
    comparison = answer("compare", "digits", "--clients", 4, *words, *QUICK)
    shown = {row["method"]: row["settings"] for row in comparison["methods"]}
    assert shown == {"FedAvg": "FedAvg(lr=0.3)", "FedCLUP": "FedCLUP(lr=0.3, lam=0.7)", "Ditto": "Ditto(lr=0.3, lam=0.2)"}


def test_flags_win_over_the_file():
    Path("mine.toml").write_text(
        'data = "digits"\nmethod = "fedavg"\nrounds = 9\nbatch-size = 8\nbias = true\nclients = 4\nseed = 3\n'
        "[set]\nlr = 0.5\nepochs = 2\n"
    )
    words = ("--rounds", "2", "--batch-size", "16", "--no-bias", "--lr", "0.2", "--method", "fedprox")
    done("run", "--config", "mine.toml", *words, "--out", "mine")
    config = config_of("mine")
    assert (config["rounds"], config["batch_size"], config["bias"], config["method"]) == (2, 16, False, "fedprox")
    assert (config["seed"], config["clients"]) == (3, 4)
    assert config["set"] == {"lr": 0.2, "epochs": 2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("roundz = 3", "unknown setting 'roundz'; did you mean 'rounds'?"),
        ("= = =", "is not TOML"),
        ("rounds = " + "1" * 5000, "is not TOML"),
        ("rounds = " + "[" * 5000, "is not TOML"),
        ("rounds = 'many'", "rounds must be a valid integer"),
        ("rounds = true", "rounds must have a value of another kind, not True"),
        ("rounds = 1.5", "rounds must be a valid integer"),
        ("set = 3", "set must be a valid dictionary"),
        ("method = 3", "method must be a valid string"),
        ("[set]\nlambda = 3", "did you mean 'lam'?"),
        ("[with]\nn = 3", "no option 'n'"),
    ],
)
def test_a_file_with_a_mistake_is_refused(text, says):
    Path("mine.toml").write_text(text)
    assert says in refusal("run", "digits", "--config", "mine.toml", "--out", "new")


def test_a_configuration_that_is_no_file_is_refused():
    Path("folder").mkdir()
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "there is no file nope.toml" in refusal("run", "digits", "--config", "nope.toml")
    assert "folder cannot be read" in refusal("run", "digits", "--config", "folder")
    assert "binary.toml cannot be read as text" in refusal("run", "digits", "--config", "binary.toml")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "run",
            ("digits", "ditto", "--lam", "0.3", "--clients", "4", "--partition", "dirichlet:0.5", "--cohort", "3", "--seed", "2"),
        ),
        ("run", ("patients.csv", *COLUMNS, "--drop", "age", "--standardize", "client", "--batch-size", "0", "--no-bias")),
        ("run", ("clup-regression", "local", "--clients", "4", "--with", "d=3", "--lr", "0.01", "--dtype", "float64")),
        (
            "compare",
            ("digits", "--clients", "4", "--methods", "local,fedclup", "--seeds", "2", "--lr", "0.2", "--set", "fedclup.lam=0.2"),
        ),
        ("compare", ("digits", "--clients", "4", "--methods", "fedavg", "--tune", "--grid", "lr=0.1,0.3")),
    ],
)
def test_saved_settings_give_the_identical_run(command, words, table):
    done(command, *words, *QUICK, "--save-config", "kept/mine.toml", "--out", "a")
    done(command, "--config", "kept/mine.toml", "--out", "b")
    done(command, "--config", "b/config.toml", "--out", "c")
    for other in ("b", "c"):
        (assert_same_run if command == "run" else assert_same_comparison)(Path("a"), Path(other))
    assert config_of("a") == config_of("b") == config_of("c")


def test_a_run_directory_rebuilds_the_settings_it_was_made_with(table):
    words = ("--batch-size", "0", "--test-share", "0.3", "--val-share", "0.2", "--data-seed", "4", "--new-clients", "0.3")
    done("run", table, *COLUMNS, "--method", "pfedme", "--lam", "0.4", *words, *QUICK, "--save-config", "mine.toml", "--out", "a")
    saved = RunSettings.of(tomllib.loads(Path("mine.toml").read_text()))
    rebuilt = RunSettings.of(config_of("a"))
    assert rebuilt.algorithm() == saved.algorithm() == ft.PFedMe(lam=0.4)
    assert rebuilt.options() == saved.options()
    assert rebuilt.federation().names == saved.federation().names
    ignored = {"data", "task"}  # the path is written out in full; the task may be written as it was guessed
    assert rebuilt.model_dump(exclude=ignored) == saved.model_dump(exclude=ignored)


@pytest.mark.parametrize("batch_size", [None, 16])
@pytest.mark.parametrize("source", ["digits", "table"])
def test_a_run_from_python_can_be_repeated_from_its_directory_alone(batch_size, source, table, here):
    options = {"clients": 4} if source == "digits" else {"client": "hospital", "label": "sick", "missing": "drop"}
    federation = ft.Federation.load("digits" if source == "digits" else str(table), **options)
    opt = ft.SGD(momentum=0.5)
    ft.run(ft.FedAvg(lr=ft.Cosine(0.2, 10), opt=opt), federation, rounds=2, batch_size=batch_size, cohort=2, out=here / "a")
    rebuilt = RunSettings.of(config_of("a"))
    assert rebuilt.algorithm() == ft.FedAvg(lr=ft.Cosine(0.2, 10), opt=opt)
    assert rebuilt.options().batch_size == batch_size
    assert rebuilt.options().cohort == 2
    done("run", "--config", "a/config.toml", "--out", "b")
    assert_same_run(Path("a"), Path("b"))


def test_a_comparison_from_python_can_be_resumed_on_the_command_line(here):
    federation = ft.Federation.load("digits", clients=4)
    methods = {"gentle": ft.FedCLUP(lam=0.1), "firm": ft.FedCLUP(lam=1.0)}
    whole = ft.compare(methods, federation, rounds=2, seeds=2, out=here / "a")
    rebuilt = CompareSettings.of(config_of("a"))
    assert rebuilt.algorithms() == methods
    Path("a/manifest.json").unlink()
    resumed = answer("resume", "a")
    assert [row["acc_personal"] for row in resumed["methods"]] == [row["acc_personal"] for row in whole.table()]


def test_a_run_from_objects_cannot_be_resumed_on_the_command_line(here):
    ft.run(ft.Local(), make.federation([6, 7]), rounds=1, out=here / "a")
    assert "begun in Python" in refusal("resume", "a")


def test_a_grid_without_tune_is_said_to_be_unused():
    result = done("compare", "digits", "--clients", 4, "--methods", "local", "--grid", "lr=0.1", *QUICK)
    assert "--tune" in result.stderr


def test_runs_without_a_directory_do_not_meet():
    places = [answer("run", "digits", "--clients", 4, *QUICK)["out"] for _ in range(3)]
    assert places == ["runs/digits-fedclup", "runs/digits-fedclup-2", "runs/digits-fedclup-3"]
    assert new_folder("text:plays", "flow") == Path("runs/text-plays-flow")  # a colon is no part of a name everywhere


def test_several_seeds_give_a_run_each_and_the_mean():
    comparison = answer(
        "compare", "digits", "--clients", 4, "--methods", "fedavg", "--seeds", 2, "--seed", 5, *QUICK, "--out", "a"
    )
    each = [json.loads(Path(f"a/runs/fedavg/seed-{n}/summary.json").read_text()) for n in (5, 6)]
    assert comparison["methods"][0]["loss_personal"] == pytest.approx(np.mean([s["loss_personal"] for s in each]))
    assert each[0]["seed"] != each[1]["seed"]


# -- predict and export --------------------------------------------------------------------------------------------------


def chances(run, client, rows):
    """What the run itself says of new rows."""
    logits = run.predict(client, run.federation.schema.encode(rows, client))
    return torch.softmax(logits, -1).numpy()


def test_predictions_are_those_of_the_run(trained):
    run, folder = trained
    rows = hospitals(seed=9).drop(columns="sick").sample(frac=1, random_state=0)
    rows.to_csv("rows.csv", index=False)
    done("predict", folder, "rows.csv", "--to", "out.csv")
    predictions = pd.read_csv("out.csv")
    assert list(predictions.columns) == [*rows.columns, "prediction", "probability no", "probability yes", "model used"]
    pd.testing.assert_frame_equal(predictions[list(rows.columns)], rows.reset_index(drop=True))
    for client, part in rows.groupby("hospital"):
        own = chances(run, client, part)
        mine = predictions[predictions.hospital == client]
        np.testing.assert_allclose(mine[["probability no", "probability yes"]], own, atol=1e-6)
        assert list(mine.prediction) == list(np.array(["no", "yes"])[own.argmax(1)])


def test_predictions_go_to_stdout_unless_a_file_is_named(trained, table):
    done("predict", trained[1], table, "--to", "deep/out.csv")
    assert pd.read_csv(io.StringIO(done("predict", trained[1], table).stdout)).equals(pd.read_csv("deep/out.csv"))


def test_a_client_that_is_named_predicts_all_rows(trained, table):
    run, folder = trained
    predictions = pd.DataFrame(answer("predict", folder, table, "--client", "H1"))
    np.testing.assert_allclose(predictions[["probability no", "probability yes"]], chances(run, "H1", hospitals()), atol=1e-6)


def test_strangers_rows_are_predicted_by_the_shared_model_and_it_is_said(trained):
    run, folder = trained
    rows = hospitals(seed=4)
    rows["hospital"] = rows.hospital.replace("H1", "Elsewhere")
    rows.to_csv("rows.csv", index=False)
    result = done("predict", folder, "rows.csv", "--json")
    assert "no model of Elsewhere; the shared model" in result.stderr
    predictions = pd.DataFrame(strictly(result.stdout))
    theirs = predictions[predictions.hospital == "Elsewhere"]
    shared = run.predict_global(run.federation.schema.encode(rows[rows.hospital == "Elsewhere"]))
    np.testing.assert_allclose(theirs["probability yes"], torch.softmax(shared, -1)[:, 1], atol=1e-6)


def test_predict_refuses_what_it_cannot_use(trained, table):
    folder = trained[1]
    assert "no client 'H9'; the clients are H0, H1, H2" in refusal("predict", folder, table, "--client", "H9")
    hospitals().drop(columns=["age", "ward"]).to_csv("less.csv", index=False)
    message = refusal("predict", folder, "less.csv")
    assert "'age', 'ward'" in message
    hospitals().drop(columns="hospital").to_csv("whose.csv", index=False)
    assert "whose model? give --client, one of H0, H1, H2" in refusal("predict", folder, "whose.csv")
    assert "nowhere.csv" in refusal("predict", folder, "nowhere.csv")
    Path("empty.csv").touch()
    assert "empty" in refusal("predict", folder, "empty.csv")


def test_rows_for_images_need_the_right_number_of_columns():
    done("run", "digits", "--clients", 4, *QUICK, "--out", "mine")
    pd.DataFrame(np.zeros((2, 63))).to_csv("rows.csv", index=False)
    names = models.read(Path("mine")).clients
    assert "63 columns of numbers but the model was trained on 64" in refusal("predict", "mine", "rows.csv", "--client", names[0])
    pd.DataFrame(np.zeros((2, 64))).to_csv("rows.csv", index=False)
    assert len(answer("predict", "mine", "rows.csv", "--client", names[0])) == 2


def test_numbers_are_predicted_in_their_own_units():
    rows = hospitals()
    rows["cost"] = 1000 + 50 * rows.x + np.arange(len(rows)) % 3 / 7
    rows.to_csv("cost.csv", index=False)
    words = (
        "--client",
        "hospital",
        "--label",
        "cost",
        "--features",
        "x",
        "--with",
        "standardize_label=true",
        "--missing",
        "drop",
    )
    done("run", "cost.csv", "local", *words, "--rounds", 200, "--evaluate-every", 0, "--out", "mine")
    predictions = pd.DataFrame(answer("predict", "mine", "cost.csv"))
    assert np.abs(predictions.prediction - predictions.cost).max() < 5


def test_the_best_method_of_a_comparison_predicts_unless_another_is_named(table):
    comparison = answer("compare", table, *COLUMNS, "--methods", "local,fedavg", *QUICK, "--out", "all")
    result = done("predict", "all", table)
    assert f"{comparison['best']} was best on validation" in result.stderr
    by_method = {m: done("predict", f"all/runs/{m.lower()}/seed-0", table).stdout for m in ("Local", "FedAvg")}
    assert result.stdout == by_method[comparison["best"]]
    assert all(done("predict", "all", table, "--method", m).stdout == by_method[m] for m in by_method)
    assert "no method 'fedavgg' there; did you mean" in refusal("predict", "all", table, "--method", "fedavgg")


@pytest.mark.parametrize("client", [None, "H0", "H2"])
def test_an_exported_model_is_the_runs(client, trained):
    run, folder = trained
    done("export", folder, "--to", "deep/m.safetensors", *([] if client is None else ["--client", client]))
    exported, expected = load_file("deep/m.safetensors"), run.state_dict(client)
    assert set(exported) == set(expected)
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


def test_all_models_are_exported_at_once_and_a_stranger_is_refused(trained):
    run, folder = trained
    written = answer("export", folder, "--all", "--to", "models")["written"]
    assert written == [f"models/{name}.safetensors" for name in ("H0", "H1", "H2")]
    for path, name in zip(written, run.federation.names, strict=True):
        assert all(torch.equal(value, run.state_dict(name)[key]) for key, value in load_file(path).items())
    assert "no client 'H9'" in refusal("export", folder, "--client", "H9")


def methods():
    return [kind for kind in METHODS if kind.__name__ not in ("FedDF", "PerAda", "AL2SGD", "FedBN")]


@pytest.mark.parametrize("kind", methods(), ids=lambda kind: kind.__name__)
def test_a_client_is_exported_just_where_one_model_gives_its_predictions(kind, here):
    federation = make.federation([8, 9], d=4, val=True)
    run = ft.run(kind(), federation, "mlp", rounds=2, out=here / "mine")
    saved = models.read(here / "mine")
    x = np.random.default_rng(0).normal(size=(5, 4))
    client = federation.names[1]
    assert torch.equal(saved.predict(client, x), run.predict(client, x))
    try:
        own = run.state_dict(client)
    except ft.errors.ModelMismatch:
        with pytest.raises(ft.errors.ModelMismatch, match="use predict"):
            saved.weights(client)
    else:
        assert all(torch.equal(value, own[name]) for name, value in saved.weights(client).items())


# -- stopped and resumed -------------------------------------------------------------------------------------------------


def test_ctrl_c_says_how_to_go_on_and_the_resumed_run_is_the_same():
    words = ("run", "digits", "ditto", "--clients", 6, "--rounds", 100, "--evaluate-every", 0)
    process = Command(*words, "--out", "cut")
    assert appears(Path("cut/checkpoints/round-0000000.json"), process.alive)
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    code, out, err = process.wait()
    assert code == 130
    assert out == ""
    assert err == "fedtailor: stopped; go on with: fedtailor resume cut\n"
    assert not Path("cut/summary.json").exists()
    done("resume", "cut")
    done(*words, "--out", "whole")
    assert_same_run(Path("whole"), Path("cut"))


# -- the real program ----------------------------------------------------------------------------------------------------


def test_help_and_the_import_of_the_command_line_do_not_load_torch():
    script = """
import sys
from typer.testing import CliRunner
from fedtailor.cli import app
for words in (["--help"], ["--version"], ["run", "--help"], ["compare", "--help"], ["predict", "--help"], ["data", "--help"]):
    assert CliRunner().invoke(app, words).exit_code == 0, words
heavy = {"torch", "pandas", "sklearn", "scipy"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_real_program_refuses_with_two_and_one_line():
    program = [sys.executable, "-c", "from fedtailor.cli import main; main()"]
    words = ("run", "digits", "--lam", "-1", "--out", "new")
    ended = subprocess.run([*program, *words], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == "fedtailor: FedCLUP: lam must be at least 0, not -1\n"
    assert not Path("new").exists()


# -- privacy ------------------------------------------------------------------------------------------------------------
PRIVATE = ("run", "ditto", "digits", "--clients", "3", "--steps", "2", *QUICK)


def test_privacy_is_a_few_flags(tmp_path):
    summary = answer(*PRIVATE, "--dp-clip", "0.5", "--dp-noise", "2", "--dp-seed", "3", "--out", tmp_path / "a")
    assert (summary["clip"], summary["noise"], summary["sampling"]) == (0.5, 2.0, "poisson")
    assert 0 < summary["epsilon"] <= summary["epsilon_max"]
    assert summary["noise_secret"] is False
    by_table = answer(*PRIVATE, "--set", 'opt={kind="private", clip=0.5, noise=2.0, seed=3}', "--out", tmp_path / "b")
    assert by_table["epsilon"] == summary["epsilon"]
    assert by_table["loss_personal"] == summary["loss_personal"]
    shown = done(*PRIVATE, "--dp-noise", "2", "--out", tmp_path / "c").stdout
    assert "Private(noise=2.0)" in "".join(shown.split())
    assert "changes what its client sends" in (tmp_path / "c" / "report.html").read_text()


def test_a_target_epsilon_is_met_and_a_run_with_one_is_resumed(tmp_path):
    summary = answer(*PRIVATE, "--target-epsilon", "3", "--dp-sampling", "shuffle", "--dp-delta", "1e-4", "--out", tmp_path / "a")
    assert 2.9 < summary["epsilon_max"] <= 3
    assert summary["delta"] == 1e-4
    (tmp_path / "a" / "manifest.json").unlink()
    again = answer("resume", tmp_path / "a")
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in summary.items() if k != "seconds"}


@pytest.mark.filterwarnings("default:the trials of tuning")
def test_a_comparison_is_private_as_a_whole(tmp_path):
    words = (
        "compare",
        "digits",
        "--clients",
        "3",
        "--methods",
        "local,fedavgft",
        "--steps",
        "2",
        "--dp-noise",
        "2",
        "--rounds",
        "3",
    )
    methods = answer(*words, "--out", tmp_path / "a")["methods"]
    assert [row["noise"] for row in methods] == [2.0, 2.0]
    assert methods[0]["epsilon_max"] < methods[1]["epsilon_max"] < methods[0]["epsilon_composed"]  # fine-tuning costs
    tuned = done(*words, "--tune", "--grid", "lr=0.1,0.2", "--out", tmp_path / "b")
    assert "are counted in epsilon of all runs together" in tuned.stderr
    assert "Whoever sees all of it" in " ".join(tuned.stdout.split())
    table = tuned.stdout.partition("Local: one training row")[0]
    assert "Local" in table  # however many columns there are, it is seen whose they are
    assert "FedAvgFT" in table
    assert "Not counted: validation and test rows" in " ".join(tuned.stdout.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dp-noise", "1", "--target-epsilon", "1"), "not both"),
        (("--dp-noise", "-1"), "dp_noise must be"),
        (("--target-epsilon", "0"), "target_epsilon must be"),
        (("--target-epsilon", "1e-7"), "cannot be reached"),
        (("--dp-clip", "1", "--set", 'opt={kind="private"}'), "privacy is set twice"),
        (("--method", "knnper", "--dp-clip", "1"), "KNNPer cannot be private"),
        (("--method", "fedclup", "--steps", "theory", "--dp-clip", "1"), "not private"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_privacy_refused_is_one_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refusal("run", "digits", "--clients", "3", "--model", "mlp", *QUICK, *words)
    assert said in line


@pytest.mark.parametrize("command", ["advise", "sweep", "pretrain"])
def test_commands_that_are_not_private_refuse_to_seem_so(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flag in ("--dp-noise", "--target-epsilon", "--user-clip"):
        assert "no epsilon would count it" in refusal(command, "digits", "--clients", "3", flag, "2", "--out", "new")
    Path("private.toml").write_text('data = "digits"\ndp_noise = 2.0\n')
    assert "no epsilon would count it" in refusal(command, "--config", "private.toml", "--out", "new")
    assert not Path("new").exists()


def test_python_m_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fedtailor", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fedtailor", run_name="__main__")
    assert not ended.value.code
    assert ft.__version__ in capsys.readouterr().out
