"""A client's state on disk: whole or absent, by version, encrypted if a key is given."""

from __future__ import annotations

import pytest
import torch

from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.sites.memory import BORN, Memory, new_key


def state(value: float) -> dict[str, torch.Tensor]:
    return {"model": torch.full((2,), value, dtype=torch.float64)}


def test_the_version_asked_for_is_found_or_the_newest_before_it(tmp_path):
    memory = Memory(tmp_path)
    assert memory.recall("run", 5) == (BORN, None)
    for version in (1, 2, 4):
        memory.keep("run", version, state(version))
    assert memory.recall("run", 4)[1]["model"].tolist() == [4, 4]
    assert memory.recall("run", 3)[0] == 2
    assert memory.recall("other", 3) == (BORN, None)
    memory.forget("run", 3)
    assert memory.versions("run") == [2, 4]


def test_a_damaged_state_is_passed_over(tmp_path):
    memory = Memory(tmp_path)
    for version in (1, 2):
        memory.keep("run", version, state(version))
    path = tmp_path / "run" / "version-0000002.state"
    path.write_bytes(path.read_bytes()[:-1])
    assert memory.recall("run", 2)[0] == 1


def test_only_its_owner_may_read_a_state(tmp_path):
    Memory(tmp_path).keep("run", 1, state(1))
    assert (tmp_path / "run" / "version-0000001.state").stat().st_mode & 0o077 == 0


def test_with_a_key_nothing_is_readable_without_it(tmp_path):
    key = new_key()
    Memory(tmp_path, key).keep("run", 1, state(0.5))
    data = (tmp_path / "run" / "version-0000001.state").read_bytes()
    assert b"model" not in data
    assert Memory(tmp_path, key).recall("run", 1)[1]["model"].tolist() == [0.5, 0.5]
    with pytest.raises(BadRun, match="not written with this key"):
        Memory(tmp_path, new_key()).recall("run", 1)
    with pytest.raises(BadRun, match="encrypted"):
        Memory(tmp_path).recall("run", 1)
    with pytest.raises(InvalidArgument, match="not one that fedtailor made"):
        Memory(tmp_path, b"short").keep("run", 1, state(1))


@pytest.mark.parametrize("name", ["..", "../up", "a/b", "", "."])
def test_a_run_is_named_by_a_word(tmp_path, name):
    with pytest.raises(InvalidArgument, match="no name of a run"):
        Memory(tmp_path).keep(name, 1, state(1))
