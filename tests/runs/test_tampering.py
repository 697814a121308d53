"""A thousand small tamperings with the files of a run: refused in one line or harmless; no traceback and no other number."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli import app
from fedtailor.runs.contents import write_manifest
from fedtailor.runs.layout import MANIFEST

COMMANDS = ("report", "predict", "export", "resume")
ABSURD = (b"", b"[]", b"{}", b"3", b"null", b"\0" * 9, b"[" * 9000, b'{"a":' * 9000, b'"a"', b"\xff\xfe", b"[[1, 2]]", b"1e999")
VALUES = (None, True, -1, 0, 1e308, float("nan"), 10**30, "", "x", "../../../etc/passwd", [], {}, [[]], ["a"], {"a": None})


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A finished run, a comparison and a run that was stopped, on a table, and rows to predict."""
    place = tmp_path_factory.mktemp("tampering")
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({"who": np.repeat(["a", "b", "c"], 12), "x": draw.normal(size=36), "z": draw.normal(size=36)})
    rows["y"] = np.where(rows.x + 0.5 * draw.normal(size=36) > 0, "yes", "no")
    rows.to_csv(place / "rows.csv", index=False)
    clients = ft.Federation.load(str(place / "rows.csv"), client="who", label="y")
    options = {"rounds": 3, "batch_size": 4, "evaluate_every": 1, "checkpoint_every": 1, "engine": "vectorized"}
    ft.run(ft.Ditto(lr=0.2), clients, out=place / "run", **options)
    ft.compare([ft.Local(), ft.FedAvg()], clients, tune={"lr": [0.1, 0.2]}, out=place / "compare", **options)

    def stop(record):
        if record["round"] == 1:
            raise Stop

    with pytest.raises(Stop):
        ft.run(ft.Ditto(lr=0.2), clients, out=place / "stopped", callback=stop, **options)
    shutil.copytree(place / "run", place / "older")  # as if it had been written before there were manifests
    (place / "older" / MANIFEST).unlink()
    config = place / "older" / "config.toml"
    config.write_text(config.read_text().replace("format = 3", "format = 1"))
    return place


def outcome(command, folder):
    """What a command makes of a directory, or None where it refuses it in one line."""
    to = folder.parent / "written"
    words = {
        "report": ["report", folder, "--to", to],
        "predict": ["predict", folder, folder.parent / "rows.csv"],
        "export": ["export", folder, "--client", "b", "--method", "local", "--to", to],
        "resume": ["resume", folder, "--json"],
    }[command]
    with warnings.catch_warnings(action="ignore"):
        result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 2)
    assert result.stderr == "" or all(line.startswith("fedtailor: ") for line in result.stderr.splitlines())
    if result.exit_code == 2:
        assert result.stderr
        return None
    if command == "resume":
        answer = json.loads(result.stdout)
        return {key: value for key, value in answer.items() if key != "seconds"}
    return to.read_bytes() if command in ("report", "export") else result.stdout


@contextmanager
def put_back(folder):
    """Give the directory back as it was."""
    spare = folder.with_name("spare")
    shutil.copytree(folder, spare, symlinks=True)
    try:
        yield
    finally:
        shutil.rmtree(folder)
        spare.rename(folder)


def tampered(path: Path, draw: random.Random) -> str:
    """Do one small harm to a file; say which."""
    ways = ["bit", "cut", "longer", "gone", "link", "folder", "absurd", "swapped", "word"]
    way = draw.choice([*ways, *(["value"] * 6 if path.suffix in (".json", ".jsonl") else [])])
    content = path.read_bytes()
    if way == "bit" and content:
        at = draw.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :])
    elif way == "cut":
        lines = content.splitlines(keepends=True)
        cut = (
            content[: draw.randrange(len(content) + 1)]
            if draw.random() < 0.5
            else b"".join(lines[: draw.randrange(len(lines) + 1)])
        )
        path.write_bytes(cut)
    elif way == "longer":
        path.write_bytes(content + draw.choice([b"\n", b"{}\n", b"x", content, b"\0" * 64]))
    elif way == "gone":
        path.unlink()
    elif way == "link":
        path.rename(path.with_name("aside"))
        path.symlink_to(path.with_name("aside"))
    elif way == "folder":
        path.unlink()
        path.mkdir()
    elif way == "swapped":
        other = draw.choice([p for p in path.parent.iterdir() if p.is_file()])
        path.write_bytes(other.read_bytes())
    elif way == "word":
        old = draw.choice(
            [b"1", b"2", b'"', b"classification", b"local", b"linear", b"float32", b"0.", b"round", b"client", b"yes"]
        )
        path.write_bytes(content.replace(old, draw.choice([b"", b"9", b"-1", b"null", b"[]", b"x", b"1e99", b"9" * 12])))
    elif way == "value":
        path.write_text(edited(content.decode(), draw))
    else:
        path.write_bytes(draw.choice(ABSURD))
    return way


def edited(text: str, draw: random.Random) -> str:
    """Json (or a line of json lines) with one value changed, removed or turned around."""
    lines = text.splitlines() if text.count("\n") > 1 and not text.startswith("{\n") else [text]
    at = draw.randrange(len(lines))
    value = json.loads(lines[at])
    places = [(value, key) for key in value]
    for parent, key in places:
        inner = parent[key]
        places += [
            (inner, k) for k in (inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ())
        ]
    parent, key = draw.choice(places)
    if draw.random() < 0.2:
        del parent[key]
    elif isinstance(parent[key], list) and draw.random() < 0.5:
        parent[key].reverse()
    else:
        parent[key] = draw.choice(VALUES)
    return "\n".join([*lines[:at], json.dumps(value), *lines[at + 1 :]]) + "\n"


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def assert_harmless(place, kind, seed, count, strict=True, reseal=False):
    """Tamper ``count`` times, each time with all commands that may read it; give how often a command refused."""
    folder, refusals = place / kind, 0
    expected = {command: outcome(command, folder) for command in COMMANDS} if strict else {}
    assert not strict or all(expected.values())
    draw = random.Random(seed)
    for number in range(count):
        with put_back(folder):
            path = draw.choice(files_of(folder))
            way = tampered(path, draw)
            if reseal and not (folder / MANIFEST).is_symlink() and path.exists() and path.is_file():
                names = json.loads((place / "spare" / MANIFEST).read_text())["files"]
                write_manifest(folder, [name for name in names if (folder / name).is_file() and not (folder / name).is_symlink()])
            command = draw.choice(COMMANDS)
            found = outcome(command, folder)
            refusals += found is None
            if strict:
                where = f"{command} after {way} of {path.relative_to(folder)} ({kind}, seed {seed}, number {number})"
                assert found is None or found == expected[command], where
    return refusals


def test_eighty_tamperings_are_refused_or_harmless(place):
    assert assert_harmless(place, "run", 1, 50) > 12
    assert assert_harmless(place, "compare", 2, 30) > 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "compare"])
@pytest.mark.parametrize("seed", range(10, 14))
def test_two_thousand_tamperings_are_refused_or_harmless(kind, seed, place):
    assert assert_harmless(place, kind, seed, 250) > 60


def test_whoever_fits_the_manifest_to_the_harm_gets_no_traceback(place):
    assert_harmless(place, "run", 3, 20, strict=False, reseal=True)


def test_directories_without_a_manifest_give_no_traceback(place):
    assert_harmless(place, "older", 4, 20, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 24))
def test_hundreds_more_with_the_manifest_fitted_or_without_one(seed, place):
    assert_harmless(place, "run", seed, 250, strict=False, reseal=True)
    assert_harmless(place, "older", seed, 250, strict=False)


def resumed(place, seed, count):
    """Tamper with a run that was stopped: it is refused, or it ends as it would have."""
    folder = place / "stopped"
    with put_back(folder):
        whole = {key: value for key, value in outcome("resume", folder).items() if key != "out"}
    draw = random.Random(seed)
    for number in range(count):
        with put_back(folder):
            path = draw.choice(files_of(folder))
            way = tampered(path, draw)
            found = outcome("resume", folder)
            where = f"{way} of {path.relative_to(folder)} (seed {seed}, number {number})"
            assert found is None or {key: value for key, value in found.items() if key != "out"} == whole, where


def test_a_stopped_run_that_was_tampered_with_is_refused_or_ends_as_it_would_have(place):
    resumed(place, 5, 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30, 34))
def test_hundreds_of_tamperings_with_a_stopped_run(seed, place):
    resumed(place, seed, 150)


def test_a_link_is_never_written_through(place, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for path in files_of(place / "run"):
        with put_back(place / "run"):
            path.unlink()
            path.symlink_to(precious)
            for command in COMMANDS:
                outcome(command, place / "run")
        assert precious.read_text() == "mine"
    assert os.listdir(tmp_path) == ["precious"]
