"""A signature says who finished a run; a changed file, another key or no signature is refused in one line."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import stat

import pytest
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli import app
from fedtailor.runs.contents import write_manifest

OPTIONS = {"rounds": 1, "batch_size": 16, "engine": "vectorized"}


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(*words):
    result = call(*words)
    assert result.exit_code == 2, result.stdout + repr(result.exception)
    return result.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    place = tmp_path_factory.mktemp("signed")
    digits = ft.Federation.load("digits", clients=3)
    ft.compare([ft.FedAvg(), ft.Local()], digits, out=place / "run", **OPTIONS)
    assert call("key", place / "mine.pem").exit_code == 0
    assert call("key", place / "other.pem").exit_code == 0
    assert call("sign", place / "run", "--key", place / "mine.pem").exit_code == 0
    return place


@pytest.fixture
def copy(signed, tmp_path):
    return shutil.copytree(signed / "run", tmp_path / "run")


def test_the_private_key_is_for_its_owner_only_and_never_overwritten(signed):
    assert stat.S_IMODE(os.stat(signed / "mine.pem").st_mode) == 0o600
    assert "is there already" in refused("key", signed / "mine.pem")


def test_a_signed_comparison_is_verified_with_all_files_of_its_runs(signed):
    answer = json.loads(call("verify", signed / "run", "--key", signed / "mine.pub.pem", "--json").stdout)
    files = [p for p in (signed / "run").rglob("*") if p.is_file() and p.name not in (".lock", "manifest.sig")]
    assert answer == {"run": str(signed / "run"), "files": len(files) - 1, "signed": True, "checked": True}
    assert "signed by the owner of" in call("verify", signed / "run", "--key", signed / "mine.pub.pem").stdout
    assert "by whom was not checked" in call("verify", signed / "run").stdout


def test_another_key_is_refused(signed):
    assert "is not by the owner of" in refused("verify", signed / "run", "--key", signed / "other.pub.pem")


@pytest.mark.parametrize("key", ["mine.pem", "run/summary.json", "none.pem"])
def test_what_is_no_public_key_is_refused(key, signed):
    assert "fedtailor key KEY.pem" in refused("verify", signed / "run", "--key", signed / key)


def test_a_file_changed_with_its_manifest_is_refused_by_the_signature_alone(copy, signed):
    run = copy / "runs" / "local" / "seed-0"
    (run / "summary.json").write_text((run / "summary.json").read_text().replace("0.", "0.9"))
    assert "summary.json was changed" in refused("verify", copy)
    for folder in (run, copy):  # whoever means harm fits the manifests to it
        write_manifest(folder, json.loads((folder / "manifest.json").read_text())["files"])
    assert call("verify", copy).exit_code == 0
    assert "is not by the owner of" in refused("verify", copy, "--key", signed / "mine.pub.pem")


def test_no_signature_or_a_broken_one_is_refused(copy, signed):
    (copy / "manifest.sig").write_text("not base 64 !")
    assert "is not by the owner of" in refused("verify", copy, "--key", signed / "mine.pub.pem")
    (copy / "manifest.sig").unlink()
    assert "is not signed" in refused("verify", copy, "--key", signed / "mine.pub.pem")
    assert "not signed" in call("verify", copy).stdout


def test_a_changed_or_unfinished_run_is_not_signed(copy, signed):
    (copy / "tuning").mkdir()
    (copy / "config.toml").write_text((copy / "config.toml").read_text() + "\n")
    assert "config.toml was changed" in refused("sign", copy, "--key", signed / "mine.pem")
    (copy / "manifest.json").unlink()
    assert "is not finished" in refused("sign", copy, "--key", signed / "mine.pem")


def test_a_manifest_that_leads_outside_is_refused(copy):
    (copy.parent / "outside").write_text("x")
    names = json.loads((copy / "manifest.json").read_text())["files"]
    write_manifest(copy, [*names, "runs/../../outside"])
    assert "which is no file of a run" in refused("verify", copy)


def test_without_the_package_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def lacking(name, *rest):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", lacking)
    assert "pip install 'fedtailor[sign]'" in refused("key", tmp_path / "k.pem")
