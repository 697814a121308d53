"""Checkpoints: a tree in safetensors beside a json that holds its checksum. The last two are kept, so that one may be lost."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor import tree
from fedtailor.runs import files

KEPT = 2


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
    for path in _found(folder)[KEPT:]:
        path.unlink()  # its json first: without it the tensors are nobody's
        path.with_suffix(".safetensors").unlink(missing_ok=True)


def newest(folder: Path, usable: Any = lambda facts: True) -> Checkpoint | None:
    """The newest checkpoint that is whole (and ``usable``); a damaged one is passed over with a warning."""
    for path in _found(folder):
        try:
            facts = _unsealed(json.loads(path.read_text()))
            data = path.with_suffix(".safetensors").read_bytes()
            if digest(data) != facts["sha256"]:
                raise ValueError("its checksum does not fit")
            if not usable(facts):
                raise ValueError("the history does not reach as far")
            return Checkpoint(facts["round"], tree.unpack(data), facts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = str(error) if type(error) is ValueError else "it cannot be read"
            warnings.warn(f"checkpoint {path.stem} is damaged ({why}); going back to the one before it", stacklevel=3)
    return None


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _found(folder: Path) -> list[Path]:
    """The json files, newest first."""
    return sorted((p for p in folder.glob("round-*.json") if re.fullmatch(r"round-\d{7,}", p.stem)), key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("round-"))


def _sealed(facts: dict[str, Any]) -> dict[str, Any]:
    return {**facts, "seal": digest(json.dumps(facts, sort_keys=True).encode())}


def _unsealed(facts: dict[str, Any]) -> dict[str, Any]:
    seal = facts.pop("seal")
    if seal != digest(json.dumps(facts, sort_keys=True).encode()):
        raise ValueError("its facts were changed")
    return facts
