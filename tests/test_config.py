"""Settings: the same names everywhere, checked, layered and written so that they read back the same."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.config import CompareSettings, RunSettings, assignments, join, read, value
from fedtailor.engine.checked import names as flags
from fedtailor.engine.options import Options
from fedtailor.errors import InvalidArgument
from tests.make import federation


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5", 0.5),
        (" 3 ", 3),
        ("-1", -1),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("true", True),
        ("False", False),
        ("0.1,0.3", [0.1, 0.3]),
        ("a, b,", ["a", "b"]),
        ("[1, 2]", [1, 2]),
        ("{kind = 'adam', lr = 1}", {"kind": "adam", "lr": 1}),
        ('"0.5"', "0.5"),
        ("dirichlet:0.3", "dirichlet:0.3"),
        ("", ""),
        ("#1", "#1"),
        ("1\nlr = 2", "1\nlr = 2"),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_a_word_is_read_as_toml_would_or_is_itself(text, expected):
    parsed = value(text)
    assert parsed == expected
    assert type(parsed) is type(expected)


def test_a_number_with_thousands_of_digits_does_not_stop_the_command_line():
    assert value("1" * 5000) == float("inf")


def test_assignments_nest_by_the_last_dot_and_forgive_dashes():
    pairs = ["lr=0.1", "server-lr = 2", "fedprox-personal.lam=0.5", "fedprox-personal.final-steps=3", "lr=0.2"]
    expected = {"lr": 0.2, "server_lr": 2, "fedprox-personal": {"lam": 0.5, "final_steps": 3}}
    assert assignments(pairs, "--set") == expected


@pytest.mark.parametrize("pair", ["lam", "=1", " =1", "", ".lam=1", "fedclup.=1", "."])
def test_an_assignment_without_a_name_is_refused(pair):
    with pytest.raises(InvalidArgument, match="--set must look like NAME=VALUE"):
        assignments([pair], "--set")


@pytest.mark.parametrize("pairs", [["a=1", "a.b=2"], ["a.b=2", "a=1"], ["a=word", "a.b=2"]])
def test_a_value_and_a_table_under_one_name_are_refused(pairs):
    with pytest.raises(InvalidArgument, match="gives a a value and settings of its own"):
        assignments(pairs, "--set")


def test_later_layers_win_key_by_key():
    low = {"rounds": 1, "set": {"lr": 1, "opt": {"kind": "sgd", "momentum": 0.5}}}
    high = {"set": {"opt": {"momentum": 0.9}}, "seed": 2}
    expected = {"rounds": 1, "seed": 2, "set": {"lr": 1, "opt": {"kind": "sgd", "momentum": 0.9}}}
    assert join(low, high) == expected
    assert low["set"]["opt"]["momentum"] == 0.5
    assert join({"set": {"a": 1}}, {"set": 5}) == {"set": 5}
    assert join() == {}


def test_dashes_and_underscores_are_the_same_in_a_file():
    assert RunSettings.of({"data": "digits", "batch-size": 4}) == RunSettings.of({"data": "digits", "batch_size": 4})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "data is missing"),
        ({"data": "digits", "roundz": 3}, "unknown setting 'roundz'; did you mean 'rounds'?"),
        ({"data": "digits", "xyz": 3}, "the settings are data, client"),
        ({"data": "digits", "rounds": True}, "rounds must have a value of another kind, not True"),
        ({"data": "digits", "cohort": float("inf")}, "cohort must be a finite number"),
        ({"data": "digits", "bias": "perhaps"}, "bias must be a valid boolean"),
        ({"data": "digits", "test_share": 1.0}, "test_share must be less than 1"),
        ({"data": "digits", "device": "gpu"}, "device must be cpu, cuda, cuda:N, mps or auto"),
        ({"data": "digits", "set": "x" * 999}, "set must be a valid dictionary"),
        ({"data": "digits", "a\nb": 1}, "unknown setting 'a\\\\nb'"),
    ],
)
def test_wrong_settings_are_refused_in_one_short_line(values, says):
    with pytest.raises(InvalidArgument, match=says) as caught:
        RunSettings.of(values)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800  # all settings by name, once


def test_a_refusal_says_where_the_settings_came_from():
    with pytest.raises(InvalidArgument, match=r"^here: rounds must be"):
        RunSettings.of({"data": "digits", "rounds": -1}, "here: ")


def test_settings_written_to_a_file_read_back_equal():
    values = {
        "data": "digits",
        "clients": 7,
        "partition": "dirichlet:0.3",
        "features": ["a b", "c"],
        "batch_size": 0,
        "bias": False,
        "cohort": 0.5,
        "rounds": 100,
        "with": {"n": 5, "shape": [1, 2]},
        "method": "ditto",
        "set": {"lr": {"kind": "cosine", "start": 0.3, "rounds": 10}, "lam": 0.5},
    }
    settings = RunSettings.of(values)
    assert RunSettings.of(tomllib.loads(settings.toml())) == settings
    both = CompareSettings.of({"data": "digits", "tune": True, "grid": {"lr": [0.1, 0.3]}, "methods": ["local"], "seeds": 3})
    assert CompareSettings.of(tomllib.loads(both.toml())) == both


def test_the_settings_of_a_method_make_the_method():
    settings = RunSettings.of({"data": "digits", "method": "Fed-Avg", "set": {"opt": {"kind": "adam"}, "lr": 0.2}})
    assert settings.algorithm() == ft.FedAvg(lr=0.2, opt=ft.Adam())


def test_in_a_comparison_settings_of_one_method_under_two_spellings_are_joined():
    methods = ["fedclup"]
    settings = CompareSettings.of({"data": "d", "methods": methods, "set": {"fedclup": {"lam": 0.2}, "FedCLUP": {"lr": 0.3}}})
    assert settings.algorithms() == {"FedCLUP": ft.FedCLUP(lam=0.2, lr=0.3)}


def test_in_a_comparison_a_methods_own_setting_wins_over_the_common_one():
    settings = CompareSettings.of(
        {"data": "d", "methods": ["fedavg", "ditto"], "set": {"lr": 0.5, "ditto": {"lr": 0.1, "lam": 2}}}
    )
    assert settings.algorithms() == {"FedAvg": ft.FedAvg(lr=0.5), "Ditto": ft.Ditto(lr=0.1, lam=2)}


def test_a_schedule_for_all_methods_is_not_taken_for_a_method():
    schedule = {"kind": "cosine", "start": 0.3, "rounds": 10}
    settings = CompareSettings.of({"data": "d", "methods": ["fedavg", "local"], "set": {"lr": schedule}})
    assert settings.algorithms()["Local"].lr == ft.Cosine(0.3, 10)


def test_a_cohort_above_one_is_a_number_of_clients():
    assert RunSettings.of({"data": "d", "cohort": 5.0}).options().cohort == 5
    assert isinstance(RunSettings.of({"data": "d", "cohort": "5"}).options().cohort, int)
    assert RunSettings.of({"data": "d", "cohort": "1.0"}).options().cohort == 1.0
    assert RunSettings.of({"data": "d", "cohort": "1 client"}).options().size(7) == 1
    assert RunSettings.of({"data": "d", "cohort": 1, "format": 1}).options().cohort == 1.0  # as an earlier version wrote it
    with pytest.raises(InvalidArgument, match="number of clients from 2 on"):
        RunSettings.of({"data": "d", "cohort": 2.5})


@pytest.mark.parametrize("bare", [1, "1", np.int64(1)])
def test_a_bare_one_is_refused_as_a_cohort_with_both_spellings(bare):
    with pytest.raises(InvalidArgument, match=r"write 1\.0 for all clients, '1 client' for one"):
        ft.run(ft.FedAvg(), federation([4, 5]), cohort=bare)


def test_one_client_in_words_is_a_round_of_one_client():
    assert ft.run(ft.FedAvg(), federation([4, 5, 6]), cohort="1 client", rounds=2).history[0]["cohort"] == 1


def test_every_option_of_a_run_is_a_keyword_a_flag_and_a_line_of_the_help():
    shown = inspect.signature(ft.run).parameters
    for name, field in Options.model_fields.items():
        assert name in shown
        assert name in flags(RunSettings)
        assert f"{name}: {field.description}" in ft.run.__doc__


def test_a_misspelt_option_is_a_type_error_that_names_the_right_one():
    with pytest.raises(TypeError, match="unknown setting 'batchsize'; did you mean 'batch_size'"):
        ft.run(ft.FedAvg(), federation([4, 5]), batchsize=3)


def test_no_batch_size_is_the_flags_default_in_a_file_and_pythons_in_a_run_directory():
    assert RunSettings.of({"data": "d"}).options().batch_size == 32
    assert RunSettings.of({"data": "d", "format": 1}).options().batch_size is None
    assert RunSettings.of({"data": "d", "format": 1, "batch_size": 8}).options().batch_size == 8


def test_a_name_too_long_for_a_file_is_refused():
    with pytest.raises(InvalidArgument, match="cannot be read"):
        RunSettings.of({"data": "x" * 999}).federation()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a = ", "is not TOML"),
        (b"a = 1\na = 2", "is not TOML"),
        (b"a = " + b"9" * 5000, "is not TOML"),
        (b"a = " + b"{a=" * 3000, "is not TOML"),
        (b"\xff\xfe", "cannot be read as text"),
    ],
)
def test_a_file_that_is_no_toml_is_refused(content, says, tmp_path):
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(InvalidArgument, match=says) as caught:
        read(tmp_path / "c.toml")
    assert "\n" not in str(caught.value)


def test_a_file_is_read_as_utf_8_whatever_the_locale(tmp_path, monkeypatch):
    monkeypatch.setattr("locale.getpreferredencoding", lambda do=True: "ascii")
    (tmp_path / "c.toml").write_bytes('label = "größe"'.encode())
    assert read(tmp_path / "c.toml") == {"label": "größe"}


def test_no_file_and_a_directory_are_refused(tmp_path):
    for path, says in (
        (tmp_path, "cannot be read"),
        (tmp_path / "no.toml", "there is no file"),
        (Path("a\0b"), "cannot be read|not TOML"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            read(path)


def test_every_setting_has_a_flag_with_help():
    for kind in (RunSettings, CompareSettings):
        assert len(set(flags(kind))) == len(kind.model_fields)
        assert all(field.description for field in kind.model_fields.values())


def test_a_method_that_is_named_twice_is_refused():
    for twice in (["local", "local"], ["fedavg", "local", "FedAvg"]):
        with pytest.raises(InvalidArgument, match="given twice"):
            CompareSettings.of({"data": "digits", "methods": twice}).algorithms()
