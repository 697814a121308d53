"""Random settings, files and run directories: something valid, or one line that says what is wrong; never anything else."""

from __future__ import annotations

import random
import shutil
import tempfile
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.algorithms import METHODS
from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import slug
from fedtailor.cli import app
from fedtailor.config import CompareSettings, RunSettings, assignments, read, value
from fedtailor.engine.checked import names as flags
from fedtailor.errors import FedtailorError
from tests.fuzz import fuzz


def sound(make):
    """What ``make`` gives; None where it refuses in one line."""
    try:
        return make()
    except FedtailorError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        return None


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(max_size=5),
    st.dates(),
    st.datetimes(),
    st.times(),
    st.sampled_from(
        ["theory", "client", "first-order", "head", "auto", "float64", "pooled", "", "0.5", "digits", "cosine", "adam"]
    ),
)
methods = st.sampled_from([slug(m) for m in METHODS]) | st.text(max_size=4) | st.sampled_from(["FedAvg", "FED AVG", "fed-clup"])
own = st.sampled_from(
    ["lr", "lam", "mu", "steps", "epochs", "opt", "personal", "server_lr", "alpha", "k", "p", "kind", "method", "radius"]
)
kinds = st.fixed_dictionaries(
    {"kind": st.sampled_from(["sgd", "adam", "cosine", "exponential", "harmonic", "milestones", "x"]) | scalars},
    optional={"lr": scalars, "momentum": scalars, "start": scalars, "rounds": scalars, "at": st.lists(scalars, max_size=2)},
)
values = st.recursive(
    scalars | kinds, lambda v: st.lists(v, max_size=3) | st.dictionaries(own | st.text(max_size=3), v, max_size=3)
)
tables = st.dictionaries(own | methods, values, max_size=4)


def likely(kind):
    """Mostly names that exist, with values that may or may not fit."""
    sensible = {
        "data": st.just("digits") | scalars,
        "method": methods | scalars,
        "methods": st.lists(methods, max_size=4) | scalars,
        "set": tables | values,
        "with": tables | values,
        "grid": st.dictionaries(own, st.lists(st.floats(), max_size=3) | values, max_size=3) | values,
    }
    names = st.sampled_from([*flags(kind), "format", "version", "command", "batch-size", "roundz"]) | st.text(max_size=4)
    some = st.dictionaries(names, values, max_size=3)
    usual = st.fixed_dictionaries({}, optional={k: v for k, v in sensible.items() if k in flags(kind)})
    return st.builds(lambda a, b: {"data": "digits", **a, **b}, some, usual) | some


def settled(kind, values):
    """Settings and methods from plain values, and back through a file."""
    made = sound(lambda: kind.of(values))
    if made is None:
        return
    assert made.options().cohort != 0
    if kind is RunSettings:
        algorithm = sound(made.algorithm)
        assert algorithm is None or isinstance(algorithm, Algorithm)
    else:
        by_label = sound(made.algorithms)
        assert by_label is None or len(by_label) == len(made.methods)


@pytest.mark.parametrize("kind", [RunSettings, CompareSettings])
@fuzz(250)
@given(data=st.data())
def test_random_settings(kind, data):
    settled(kind, data.draw(likely(kind)))


@pytest.mark.parametrize("kind", [RunSettings, CompareSettings])
@fuzz(150)
@given(data=st.data())
def test_valid_settings_read_back_from_the_file_they_are_written_to(kind, data):
    plain = st.integers(0, 9) | st.floats(0.001, 0.999) | st.text(max_size=5) | st.booleans()
    names = st.sampled_from([name for name in flags(kind) if name not in ("set", "with", "grid", "methods", "method")])
    values = {"data": "digits", **data.draw(st.dictionaries(names, plain, max_size=5))}
    values["set"] = data.draw(st.dictionaries(st.text(max_size=5), plain | st.lists(plain, max_size=3), max_size=3))
    made = sound(lambda: kind.of(values))
    if made is not None:
        assert kind.of(tomllib.loads(made.toml())) == made


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "c.toml"


def written(plain):
    try:
        return tomli_w.dumps(plain).encode()
    except (TypeError, AttributeError, ValueError):  # None, and other things a file cannot hold
        return repr(plain).encode()


lines = st.builds(
    lambda name, text: f"{name} = {text}",
    st.sampled_from([*flags(RunSettings), *flags(CompareSettings), "set.lam", "set.lr.kind", '"a b"']) | st.text(max_size=4),
    st.text(max_size=8)
    | st.sampled_from(["3", "0.5", "'digits'", "[1, 2]", "{a = 1}", "nan", "-inf", "true", "2020-01-01", "1e400", "0x10"]),
)
texts = st.one_of(
    st.binary(max_size=30),
    st.text(max_size=30).map(lambda text: text.encode("utf-8", "replace")),
    st.lists(lines | st.sampled_from(["[set]", "[with]", "[[set]]", "[set.fedclup]", "#"]), max_size=6).map(
        lambda all_: "\n".join(all_).encode("utf-8", "replace")
    ),
    likely(RunSettings).map(written),
    likely(CompareSettings).map(written),
    st.sampled_from(
        [b"[" * 9000, b"a=" + b"[" * 9000, b"a=" + b"7" * 9000, b"a." * 5000 + b"b=1", b"\0", b"\xef\xbb\xbfrounds = 1"]
    ),
)


@pytest.mark.parametrize("kind", [RunSettings, CompareSettings])
@fuzz(200)
@given(content=texts)
def test_random_files(kind, content, file):
    file.write_bytes(content)
    values = sound(lambda: read(file))
    if values is not None:
        settled(kind, values)


words = st.text(max_size=12) | st.sampled_from(
    ["1_000", "0x1F", "inf", "1e999", "'a", "[1,", "{a=1}", "1979-05-27", "a=b", "\\", '"""']
)


@fuzz(1000)
@given(words)
def test_any_word_has_a_value(text):
    value(text)


@fuzz(500)
@given(
    st.lists(
        st.builds(
            lambda n, e, v: n + e + v, st.text(max_size=6) | own | st.just("fedclup.lam"), st.sampled_from(["=", ""]), words
        )
    )
)
def test_random_assignments(pairs):
    values = sound(lambda: assignments(pairs, "--set"))
    if values is not None:
        settled(RunSettings, {"data": "digits", "set": values})
        settled(CompareSettings, {"data": "digits", "set": values})


# -- run directories -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small finished run and a comparison on a table, and rows to predict."""
    folder = tmp_path_factory.mktemp("finished")
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({"who": np.repeat(["a", "b", "c"], 12), "x": draw.normal(size=36), "y": np.tile(["no", "yes"], 18)})
    rows.to_csv(folder / "rows.csv", index=False)
    federation = ft.Federation.load(str(folder / "rows.csv"), client="who", label="y")
    ft.run(ft.FedAvg(lr=0.2), federation, rounds=2, out=folder / "run")
    ft.compare([ft.Local(), ft.FedAvg()], federation, rounds=2, tune={"lr": [0.1, 0.2]}, out=folder / "compare")
    return folder


def harmed(content: bytes, draw: random.Random) -> bytes:
    """Cut short, with bytes changed, with words swapped for others, or replaced altogether."""
    way = draw.randrange(6)
    if way == 0:
        return content[: draw.randrange(len(content) + 1)]
    if way == 1:
        at = draw.randrange(len(content))
        return content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
    if way == 2:
        start, end = sorted(draw.randrange(len(content) + 1) for _ in range(2))
        return content[:start] + content[end:]
    if way == 3:
        lines = content.split(b"\n")
        lines.pop(draw.randrange(len(lines)))
        return b"\n".join(lines)
    if way == 4:
        return draw.choice([b"", b"[]", b"{}", b"3", b"null", b"\0" * 9, b"[" * 9000, b'"a"', b"[[1, 2]]", b"\xff"])
    old = draw.choice(
        [b"1", b"2", b'"', b"classification", b"FedAvg", b"fedavg", b"linear", b"float32", b"0.", b"round", b"client", b"kind"]
    )
    return content.replace(old, draw.choice([b"", b"9", b"-1", b"null", b"[]", b"x", b"1e99", b"99999999999"]))


FILES = {
    "run": ("config.toml", "summary.json", "models/models.json", "history.jsonl"),
    "compare": (
        "config.toml",
        "summary.json",
        "tuning/local.json",
        "runs/local/seed-0/summary.json",
        "runs/fedavg/seed-0/models/models.json",
    ),
}


@pytest.mark.parametrize("command", ["report", "predict", "resume"])
@pytest.mark.parametrize("kind", FILES)
@fuzz(20)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_damage_to_a_run_directory(command, kind, seed, finished):
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "run"
        shutil.copytree(finished / kind, copy)
        path = copy / draw.choice(FILES[kind])
        path.write_bytes(harmed(path.read_bytes(), draw))
        if command == "resume" and draw.random() < 0.3:
            (copy / "manifest.json").unlink()
        rows = [str(finished / "rows.csv")] if command == "predict" else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged checkpoint is passed over with a warning
            result = CliRunner().invoke(app, [command, str(copy), *rows])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert result.exit_code in (0, 2)
        assert result.exit_code == 0 or result.stderr.splitlines()[-1].startswith("fedtailor: ")
