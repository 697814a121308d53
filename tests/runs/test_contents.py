"""A finished run holds what it held when it was finished, or is refused by the name of the file that was changed."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli import app
from fedtailor.errors import BadRun, FedtailorError
from fedtailor.runs import contents, folder, journal, models
from fedtailor.runs.layout import MANIFEST

OPTIONS = {"rounds": 3, "batch_size": 16, "engine": "vectorized", "evaluate_every": 1, "checkpoint_every": 1}
MANIFEST_OF_A_RUN = {
    "config.toml",
    "history.jsonl",
    "timing.jsonl",
    "summary.json",
    "models/models.json",
    "models/shared.safetensors",
    "models/personal.safetensors",
    "checkpoints/identity.json",
    *(f"checkpoints/round-000000{number}.{end}" for number in (2, 3) for end in ("json", "safetensors")),
}


@pytest.fixture(scope="module")
def digits():
    return ft.Federation.load("digits", clients=4)


@pytest.fixture(scope="module")
def originals(digits, tmp_path_factory):
    place = tmp_path_factory.mktemp("originals")
    ft.run(ft.Ditto(), digits, out=place / "run", **OPTIONS)
    grid = {"lr": [0.1, 0.3]}
    ft.compare([ft.FedAvg(), ft.Local()], digits, out=place / "compare", seeds=2, tune=grid, **OPTIONS)
    return place


@pytest.fixture
def copy(originals, tmp_path):
    def copied(name):
        shutil.copytree(originals / name, tmp_path / name)
        return tmp_path / name

    return copied


def refused(*words):
    """The line with which a command is refused."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.stdout + repr(result.exception)
    assert isinstance(result.exception, SystemExit)
    return result.stderr.splitlines()[-1]


def test_the_manifest_lists_every_file_that_was_written_but_the_report(originals):
    digests = json.loads((originals / "run" / MANIFEST).read_text())["files"]
    assert set(digests) == MANIFEST_OF_A_RUN
    assert all(contents.digest((originals / "run" / name).read_bytes()) == digests[name] for name in digests)


def test_the_manifest_of_a_comparison_lists_its_own_files_and_the_runs_manifests(originals):
    runs = {f"runs/{method}/seed-{seed}/{MANIFEST}" for method in ("fedavg", "local") for seed in (0, 1)}
    digests = json.loads((originals / "compare" / MANIFEST).read_text())["files"]
    assert set(digests) == {"config.toml", "summary.json", "yardsticks.json", "tuning/fedavg.json", "tuning/local.json", *runs}


def test_a_history_that_was_cut_is_refused_by_name(copy):
    path = copy("run") / "history.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-4]))
    for command in ("report", "resume"):
        assert "history.jsonl was changed after the run was finished" in refused(command, path.parent)


def test_classes_in_another_order_are_refused_by_name(copy):
    path = copy("run") / "models" / "models.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "classes": facts["classes"][::-1], "clients": facts["clients"][::-1]}))
    with pytest.raises(BadRun, match=r"models\.json was changed after the run was finished"):
        models.read(path.parent.parent)
    assert "models.json was changed" in refused("export", path.parent.parent)


@pytest.mark.parametrize(
    "name",
    ["config.toml", "summary.json", "tuning/fedavg.json", "runs/local/seed-1/history.jsonl", "runs/local/seed-1/summary.json"],
)
def test_a_comparison_with_a_changed_file_is_refused_by_name(name, copy):
    path = copy("compare") / name
    path.write_text(path.read_text().replace("0", "1"))
    for command in ("report", "predict", "export"):
        rows = ["examples/patients.csv"] if command == "predict" else []
        assert f"{name} was changed after the run was finished" in refused(command, path.parents[name.count("/")], *rows)


def test_a_run_from_another_comparison_is_refused(copy, digits):
    place = copy("compare")
    shutil.rmtree(place / "runs" / "local" / "seed-1")
    ft.run(ft.Local(lr=0.2), digits, out=place / "runs" / "local" / "seed-1", **OPTIONS, seed=1)
    assert "is not that of the comparison" in refused("report", place)
    assert "is not that of the comparison" in refused("resume", place)


def test_a_planted_checkpoint_or_story_is_not_read(copy, digits):
    place = copy("run")
    for end in ("json", "safetensors"):
        shutil.copy(place / "checkpoints" / f"round-0000002.{end}", place / "checkpoints" / f"round-0000009.{end}")
    again = ft.run(ft.Ditto(), digits, out=place, resume=True, **OPTIONS)
    assert again.summary == json.loads((place / "summary.json").read_text())
    assert len(again.history) == 3


@pytest.mark.parametrize("harm", [lambda d: d.pop("history.jsonl"), lambda d: d.update({"x": "y"}), lambda d: d.clear()])
def test_a_manifest_that_was_changed_is_refused(harm, copy):
    path = copy("run") / MANIFEST
    manifest = json.loads(path.read_text())
    harm(manifest["files"])
    path.write_text(json.dumps(manifest))
    assert "manifest.json was changed or cut short" in refused("report", path.parent)


def test_a_run_without_its_manifest_is_not_finished_and_resume_writes_the_same_again(copy, digits):
    place = copy("run")
    before = (place / MANIFEST).read_bytes()
    summary = json.loads((place / "summary.json").read_text())
    (place / "summary.json").write_text(json.dumps({**summary, "acc_personal": 1.0}))
    (place / MANIFEST).unlink()
    assert "is not finished; go on with it" in refused("report", place)
    assert "is not finished; go on with it" in refused("export", place)
    again = ft.run(ft.Ditto(), digits, out=place, resume=True, **OPTIONS)
    assert {**again.summary, "seconds": 0} == {**summary, "seconds": 0}  # what lay there was not believed
    after, earlier = (
        {k: v for k, v in json.loads(m)["files"].items() if k != "summary.json"}
        for m in (before, (place / MANIFEST).read_bytes())
    )
    assert after == earlier


@pytest.mark.parametrize("moment", ["models", "summary", "manifest"])
def test_killed_while_it_ends_a_run_is_unfinished_or_finished(moment, digits, tmp_path, monkeypatch):
    whole = ft.run(ft.Ditto(), digits, out=tmp_path / "whole", **OPTIONS)

    class Killed(BaseException):
        pass

    write = journal.files.write

    def stop(path, *rest):
        if path.stem == moment:
            raise Killed
        write(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(journal.files, "write", stop)
        with pytest.raises(Killed):
            ft.run(ft.Ditto(), digits, out=tmp_path / "run", **OPTIONS)
    with pytest.raises(BadRun, match="is not finished"):
        folder.read(tmp_path / "run")
    again = ft.run(ft.Ditto(), digits, out=tmp_path / "run", resume=True, **OPTIONS)
    assert {**again.summary, "seconds": 0} == {**whole.summary, "seconds": 0}
    assert folder.read(tmp_path / "run")["Ditto"][0].summary == again.summary


def test_a_finished_run_is_not_written_to_by_resume(copy, digits):
    place = copy("run")
    for path in place.rglob("*"):
        os.utime(path, (1, 1))
    ft.run(ft.Ditto(), digits, out=place, resume=True, **OPTIONS)
    assert all(path.stat().st_mtime == 1 for path in place.rglob("*") if path.is_file() and path.name != ".lock")


def test_seconds_are_what_the_user_waited_saving_included(digits, tmp_path, monkeypatch):
    save = models.save

    def slow(*arguments):
        save(*arguments)
        journal.time.sleep(0.5)

    monkeypatch.setattr(models, "save", slow)
    began = journal.time.perf_counter()
    done = ft.run(ft.FedAvg(), digits, out=tmp_path / "run", **OPTIONS)
    waited = journal.time.perf_counter() - began
    assert 0.5 < done.summary["seconds"] <= waited
    assert waited - done.summary["seconds"] < 0.2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["seconds"] == done.summary["seconds"]


@pytest.mark.parametrize(
    "change", [{"shape": [10**9], "outputs": 10**5}, {"model": "mlp:100000000,100000000"}, {"model": "linear:9"}]
)
def test_a_network_that_the_files_cannot_hold_is_refused_before_it_takes_memory(change, copy):
    place = copy("run")
    path = place / "models" / "models.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    contents.write_manifest(place, json.loads((place / MANIFEST).read_text())["files"])  # as whoever means harm would
    with pytest.raises(FedtailorError, match=r"more parameters than the run's files|takes no option"):
        models.read(place)


@pytest.mark.parametrize(
    "line", ['{"round": 0, "seconds": []}', '{"round": [], "seconds": 1}', "3", '{"round": 0, "seconds": NaN}', "{"]
)
def test_times_that_make_no_sense_do_not_keep_a_run_from_going_on(line, copy, digits):
    place = copy("run")
    (place / MANIFEST).unlink()
    (place / "timing.jsonl").write_text(f"{line}\n")
    again = ft.run(ft.Ditto(), digits, out=place, resume=True, **OPTIONS)
    assert [record["seconds"] for record in again.history] == [0.0, 0.0, 0.0]
    assert again.summary["seconds"] > 0


def test_a_folder_in_place_of_a_file_is_refused(copy, digits):
    place = copy("run")
    (place / MANIFEST).unlink()
    (place / "checkpoints" / "round-0000003.json").unlink()
    (place / "checkpoints" / "round-0000003.json").mkdir()
    with pytest.raises(BadRun, match=r"round-0000003\.json is not what it should be"):
        ft.run(ft.Ditto(), digits, out=place, resume=True, **OPTIONS)
