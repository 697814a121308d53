"""Checkpoints: a tree in safetensors beside a json that holds its checksum. The last two are kept, so that one may be lost.

The personal state of many clients is in files of its own, which several checkpoints share (``increments``).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fedtailor import tree
from fedtailor.errors import BadRun
from fedtailor.runs import files, increments
from fedtailor.runs.contents import Contents, digest
from fedtailor.runs.increments import Part
from fedtailor.runs.layout import CHECKPOINTS
from fedtailor.runs.store import Store

KEPT = 2
NAME = re.compile(r"round-(\d{7,})\.json")
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """``state`` after ``number`` rounds, with ``facts`` about it (plain json)."""

    number: int
    state: Any
    facts: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint, store: Store | None = None, before: Sequence[Part] = ()) -> list[Part]:
    """Write it, then remove all but the newest ``KEPT``. Of a ``store``, what changed since the parts ``before`` were written
    goes into one more; return the parts that hold it now."""
    state, facts, parts = checkpoint.state, checkpoint.facts, list[Part]()
    if store is not None:
        parts, inside = increments.write(folder, checkpoint.number, store, before, bool(facts.get("finished")))
        state = state if parts else {**state, "store": inside}
        facts = {**facts, "parts": parts} if parts else facts
    data = tree.pack(state)
    name = f"round-{checkpoint.number:07d}"
    files.write(folder / f"{name}.safetensors", data)
    files.write_json(folder / f"{name}.json", _sealed({**facts, "round": checkpoint.number, "sha256": digest(data)}))
    newest, gone = (names := _newest_first(path.name for path in folder.iterdir()))[:KEPT], names[KEPT:]
    for old in gone:
        (folder / old).unlink()  # its json first: without it the tensors are nobody's
        (folder / old).with_suffix(".safetensors").unlink(missing_ok=True)
    increments.remove_others(folder, [part for name in newest for part in _parts_of(folder / name)])
    return parts


def _parts_of(path: Path) -> Sequence[Part]:
    """Return the parts that a checkpoint names; none where it cannot be read."""
    try:
        return list(_unsealed(json.loads(files.read(path))).get("parts", ()))
    except (*DAMAGED, BadRun):
        return ()


def newest(folder: Path, usable: Callable[[dict[str, Any]], bool] = lambda facts: True) -> Checkpoint | None:
    """Return the newest checkpoint that is whole (and ``usable``); a damaged one is passed over with a warning."""
    names = _newest_first(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        try:
            facts = json.loads(files.read(folder / name))
            data = files.read((folder / name).with_suffix(".safetensors"))
            checkpoint = _whole(facts, data, lambda part: files.read(folder / part))
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
    return _whole(facts or {}, data or b"", lambda part: contents.read(f"{CHECKPOINTS}/{part}") or b"")


def _whole(facts: dict[str, Any], data: bytes, reading: Callable[[str], bytes]) -> Checkpoint:
    facts = _unsealed(facts)
    if digest(data) != facts["sha256"]:
        raise ValueError("its checksum does not fit")
    state = tree.unpack(data)
    if facts.get("parts"):
        state["store"] = increments.read(facts["parts"], reading)
    return Checkpoint(facts["round"], state, facts)


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
