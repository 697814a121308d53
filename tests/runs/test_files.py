"""Writing touches the file that was named and no other, whatever lies around it."""

from __future__ import annotations

import os
import shutil
import stat

import pytest
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor.cli import app
from fedtailor.errors import BadRun, CannotWrite
from fedtailor.runs import files
from fedtailor.runs.layout import refuse_links

OPTIONS = {"rounds": 2, "batch_size": 16, "engine": "vectorized"}
PRECIOUS = "do not touch\n"


@pytest.fixture(scope="module")
def digits():
    return ft.Federation.load("digits", clients=3)


@pytest.fixture(scope="module")
def original(digits, tmp_path_factory):
    place = tmp_path_factory.mktemp("original") / "run"
    ft.run(ft.FedAvg(), digits, out=place, **OPTIONS)
    return place


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious"
    path.write_text(PRECIOUS)
    return path


def test_a_file_of_the_name_that_a_part_once_had_is_left_alone(tmp_path, precious):
    (tmp_path / "p.csv.part").symlink_to(precious)
    (tmp_path / "q.csv.part").write_text("mine")
    files.write(tmp_path / "p.csv", "new")
    files.write(tmp_path / "q.csv", "new")
    assert (tmp_path / "p.csv").read_text() == "new"
    assert precious.read_text() == PRECIOUS
    assert (tmp_path / "q.csv.part").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.csv", "p.csv.part", "precious", "q.csv", "q.csv.part"]


def test_a_link_in_place_of_the_target_is_replaced_not_followed(tmp_path, precious):
    (tmp_path / "report.html").symlink_to(precious)
    files.write(tmp_path / "report.html", "new")
    assert precious.read_text() == PRECIOUS
    assert not (tmp_path / "report.html").is_symlink()


def test_a_link_is_not_appended_to(tmp_path, precious):
    (tmp_path / "log").symlink_to(precious)
    with pytest.raises(CannotWrite, match="it is a link"):
        files.open_to_append(tmp_path / "log")
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("mode", [0o666, files.PRIVATE])
def test_permissions_are_those_asked_for(mode, tmp_path):
    before = os.umask(0o022)
    try:
        files.write(tmp_path / "file", "text", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode & ~0o022


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    for name in (f".fedtailor-{'0' * 32}.part", ".fedtailor-mine.part", "mine.part", ".part"):
        (tmp_path / name).write_text("")
    files.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".fedtailor-mine.part", ".part", "mine.part"]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "history.jsonl")
    with pytest.raises(BadRun, match="not a regular file"):
        files.read(tmp_path / "history.jsonl")
    with pytest.raises(BadRun, match="not what it should be"):
        refuse_links(tmp_path)


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("name", ["history.jsonl", "timing.jsonl", ".lock", "config.toml", "summary.json", "manifest.json"])
@pytest.mark.parametrize("command", ["report", "resume", "export"])
def test_a_linked_file_in_a_run_directory_is_refused_and_its_target_untouched(name, command, original, tmp_path, precious):
    place = shutil.copytree(original, tmp_path / "run")
    (place / name).unlink()
    (place / name).symlink_to(precious)
    result = call(command, place)
    assert result.exit_code == 2
    assert f"{name} is a link" in result.stderr
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("name", ["models", "checkpoints", "tuning", "runs", "models/extra", "checkpoints/round-0000009.json"])
def test_a_linked_folder_in_a_run_directory_is_refused_and_nothing_written_there(name, original, tmp_path, digits):
    place, elsewhere = shutil.copytree(original, tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    if (place / name).is_dir():
        shutil.rmtree(place / name)
    (place / name).symlink_to(elsewhere)
    (place / "manifest.json").unlink()  # as if it were to go on
    with pytest.raises(BadRun, match=f"{name} is a link"):
        ft.run(ft.FedAvg(), digits, out=place, resume=True, **OPTIONS)
    assert not list(elsewhere.iterdir())


def test_a_hard_link_of_a_stopped_history_is_left_as_it_is(digits, tmp_path):
    def stop(record):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ft.run(ft.FedAvg(), digits, out=tmp_path / "run", callback=stop, **OPTIONS)
    os.link(tmp_path / "run" / "history.jsonl", tmp_path / "kept")
    before = (tmp_path / "kept").read_bytes()
    ft.run(ft.FedAvg(), digits, out=tmp_path / "run", resume=True, **OPTIONS)
    assert (tmp_path / "kept").read_bytes() == before


def test_a_report_leaves_links_and_parts_beside_it_alone(original, tmp_path, precious):
    place = shutil.copytree(original, tmp_path / "run")
    for name in ("report.html.part", "report.html"):
        (place / name).symlink_to(precious)
    assert call("report", place).exit_code == 0
    assert precious.read_text() == PRECIOUS
    assert "<html" in (place / "report.html").read_text()[:200]


def test_a_log_is_not_written_through_a_link(tmp_path, precious):
    (tmp_path / "log").symlink_to(precious)
    with pytest.raises(CannotWrite, match="it is a link"):
        files.open_anew(tmp_path / "log")
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("words", [("export", "--all", "--to", "all"), ("export", "--to", "all/cork.safetensors")])
def test_a_folder_in_a_received_run_that_leads_elsewhere_is_not_written_to(words, original, tmp_path):
    shutil.copytree(original, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "all").symlink_to(tmp_path / "elsewhere")
    command, *options, to = words
    done = CliRunner().invoke(app, [command, str(tmp_path / "run"), *options, str(tmp_path / "run" / to)])
    assert done.exit_code == 2
    assert "is a link, which leads elsewhere" in done.stderr
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "mine").symlink_to(tmp_path / "elsewhere")  # a link of one's own, outside, is one's own choice
    assert (
        CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--to", str(tmp_path / "mine" / "m.safetensors")]).exit_code
        == 0
    )
