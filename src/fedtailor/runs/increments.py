"""Increments: personal state in checkpoints, of which each writes only the clients that changed since the one before.

A checkpoint lists its parts, oldest first: files with clients and their rows, of which the last that has a client counts. When
they hold more than twice what there is, all of it is written anew as one part; a little is written into the checkpoint itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtailor import tree
from fedtailor.runs import files
from fedtailor.runs.contents import digest
from fedtailor.runs.store import Store

SMALL = 1 << 20  # bytes of personal state that are written into the checkpoint itself
NAME = re.compile(r"store-\d{7,}\.safetensors")
Part = Mapping[str, Any]  # file, sha256, rows


def write(folder: Path, number: int, store: Store, before: Sequence[Part], whole: bool) -> tuple[list[Part], Any]:
    """Write what changed since the parts ``before``; return (the parts now, nothing), or (no parts, all of it) where it is little
    or to be ``whole``."""
    if whole or store.bytes < SMALL:
        store.changed[:] = False
        return [], store.dump()
    name = f"store-{number:07d}.safetensors"
    born, changed = int(store.born.sum()), int(store.changed.sum())
    if before and not changed:
        return list(before), None
    stored = sum(part["rows"] for part in before)
    anew = not before or stored + changed >= 2 * born or any(part["file"] == name for part in before)
    data = tree.pack(store.dump(None if anew else np.flatnonzero(store.changed)))
    files.write(folder / name, data)
    store.changed[:] = False
    part = {"file": name, "sha256": digest(data), "rows": born if anew else changed}
    return [part] if anew else [*before, part], None


def read(parts: Sequence[Part], reading: Callable[[str], bytes]) -> Any:
    """Return the personal state that parts hold, as ``Store.dump`` gives it; ``reading`` gives the bytes of a file."""
    dumps = []
    for part in parts:
        if not NAME.fullmatch(part["file"]):
            raise ValueError("it names a file that is none of its own")
        data = reading(part["file"])
        if digest(data) != part["sha256"]:
            raise ValueError("the checksum of its clients does not fit")
        dumps.append(tree.unpack(data))
    ids = torch.cat([dump["ids"] for dump in dumps]).numpy()
    last = torch.from_numpy(len(ids) - 1 - np.unique(ids[::-1], return_index=True)[1])  # by client
    rows = tree.map(lambda *leaves: torch.cat(leaves)[last], *(dump["rows"] for dump in dumps))
    return {"ids": torch.from_numpy(ids)[last], "rows": rows}


def remove_others(folder: Path, parts: Sequence[Part]) -> None:
    """Remove the files of clients that are none of these parts."""
    mine = {part["file"] for part in parts}
    for path in folder.iterdir():
        if NAME.fullmatch(path.name) and path.name not in mine:
            path.unlink(missing_ok=True)
