"""Checkpoints: a tree in safetensors beside a json that holds its checksum. The last two are kept, so that one may be lost."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fedtailor import tree
from fedtailor.errors import BadRun
from fedtailor.runs import files
from fedtailor.runs.contents import Contents, digest
from fedtailor.runs.layout import CHECKPOINTS

KEPT = 2
NAME = re.compile(r"round-(\d{7,})\.json")
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """``state`` after ``number`` rounds, with ``facts`` about it (plain json)."""

    number: int
    state: Any
    facts: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write it, then remove all but the newest ``KEPT``."""
    data = tree.pack(checkpoint.state)
    name = f"round-{checkpoint.number:07d}"
    files.write(folder / f"{name}.safetensors", data)
    files.write_json(folder / f"{name}.json", _sealed({**checkpoint.facts, "round": checkpoint.number, "sha256": digest(data)}))
    for old in _newest_first(path.name for path in folder.iterdir())[KEPT:]:
        (folder / old).unlink()  # its json first: without it the tensors are nobody's
        (folder / old).with_suffix(".safetensors").unlink(missing_ok=True)


def newest(folder: Path, usable: Callable[[dict[str, Any]], bool] = lambda facts: True) -> Checkpoint | None:
    """Return the newest checkpoint that is whole (and ``usable``); a damaged one is passed over with a warning."""
    names = _newest_first(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        try:
            facts = json.loads(files.read(folder / name))
            checkpoint = _whole(facts, files.read((folder / name).with_suffix(".safetensors")))
            if not usable(checkpoint.facts):
                raise ValueError("the history does not reach as far")
            return checkpoint
        except DAMAGED as error:
            why = str(error) if type(error) is ValueError else "it cannot be read"
            warnings.warn(f"checkpoint {Path(name).stem} is damaged ({why}); going back to the one before it", stacklevel=3)
    return None


def of_finished(contents: Contents) -> Checkpoint:
    """Return the last checkpoint of a finished run, as its manifest has it."""
    inside = (Path(name) for name in contents.digests or ())
    names = _newest_first(path.name for path in inside if path.parent.name == CHECKPOINTS)
    if not names:
        raise BadRun(f"{contents.folder} has no checkpoint in its manifest; restore it from a copy, or train anew")
    facts = contents.json(f"{CHECKPOINTS}/{names[0]}")
    data = contents.read(f"{CHECKPOINTS}/{Path(names[0]).stem}.safetensors")
    return _whole(facts or {}, data or b"")


def _whole(facts: dict[str, Any], data: bytes) -> Checkpoint:
    facts = _unsealed(facts)
    if digest(data) != facts["sha256"]:
        raise ValueError("its checksum does not fit")
    return Checkpoint(facts["round"], tree.unpack(data), facts)


def _newest_first(names: Iterable[str]) -> list[str]:
    """Return those names that are of a checkpoint's json."""
    return sorted((name for name in names if NAME.fullmatch(name)), key=_number, reverse=True)


def _number(name: str) -> int:
    match = NAME.fullmatch(name)
    return int(match[1]) if match else -1


def _sealed(facts: dict[str, Any]) -> dict[str, Any]:
    return {**facts, "seal": digest(json.dumps(facts, sort_keys=True).encode())}


def _unsealed(facts: dict[str, Any]) -> dict[str, Any]:
    content = {key: value for key, value in facts.items() if key != "seal"}
    if facts["seal"] != digest(json.dumps(content, sort_keys=True).encode()):
        raise ValueError("its facts were changed")
    return content
