"""The process that stands by at a site, and the one that asks it for a fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from fedtailor.sites import knock

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux only")

# Flower's own command waits until its input is closed; a message is answered by a note about who did it
STANDING_BY = """
import json, os, sys
from types import SimpleNamespace
import numpy as np
from fedtailor.sites import answering

def note():
    words, who = sys.argv[1:], {"parent": os.getppid(), "drawn": np.random.random()}
    with open(words[0], "w") as out:
        json.dump({**who, "words": words}, out)
    os.rename(words[0], words[0] + ".json")
    sys.exit(3)

answering.NEEDED, answering.answer_by_ours = (), note
sys.modules["flwr.supercore.cli"] = SimpleNamespace(flower_superexec=lambda: print("ready", flush=True) or sys.stdin.read())
answering.start_tasks(sys.argv.pop(1))
"""


@contextmanager
def started(folder):
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STANDING_BY, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.fixture
def standing_by(tmp_path):
    folder = tmp_path / ("a folder with a long name " * 6)  # longer than the address of a socket may be
    folder.mkdir()
    with started(folder) as process:
        yield folder, process


def wait_for(told, seconds=20):
    until = time.monotonic() + seconds
    while not (found := told()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def knocked(folder, *words):
    command = [sys.executable, "-I", "-S", knock.__file__, str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_message_is_answered_by_a_fork_of_one_process(standing_by, tmp_path):
    folder, process = standing_by
    for name in ("one", "two", "three"):
        assert knocked(folder, str(tmp_path / name), "--token", "é ' \"").returncode == 0
    paths = [tmp_path / f"{name}.json" for name in ("one", "two", "three")]
    notes = [json.loads(wait_for(lambda path=path: path.exists() and path.read_text())) for path in paths]
    assert [note["words"] for note in notes] == [[str(path)[:-5], "--token", "é ' \""] for path in paths]
    assert len({note["parent"] for note in notes}) == 1  # one that stands by, and is not Flower's own
    assert notes[0]["parent"] not in (process.pid, os.getpid())
    assert len({note["drawn"] for note in notes}) == 3  # forks do not draw the same numbers


def test_the_process_that_stands_by_ends_with_flowers_own(standing_by):
    folder, process = standing_by
    process.kill()  # as hard as it can be
    process.wait()
    wait_for(lambda: not knock.opened(str(folder), []))


def test_where_none_can_stand_by_flowers_own_command_works_as_it_would(tmp_path):
    with started(tmp_path / "not there"):
        assert not knock.opened(str(tmp_path), [])


def test_without_one_that_stands_by_a_message_has_a_process_of_its_own(tmp_path):
    pytest.importorskip("flwr", reason="flwr is not installed (fedtailor[flower])")
    done = knocked(tmp_path, "--help")
    assert done.returncode == 0
    assert "Run a Flower ClientApp" in done.stdout
