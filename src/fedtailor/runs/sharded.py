"""``save_shards``: a federation as a folder of files, one for every client, which nodes of a cluster read by themselves."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.federation import Federation
from fedtailor.data.readers.shards import FORMAT, INDEX, read_index
from fedtailor.data.split import Split
from fedtailor.data.unread import PARTS
from fedtailor.errors import InvalidArgument
from fedtailor.runs import files

SAME = ("forms", "kind", "classes", "tokens", "schema", "vocabulary", "packing", "public", "parts", "name")
EACH = 1000  # files in a folder
UNKNOWN = "The true parameters, and which rows follow which law, are not in shards."


def save_shards(federation: Federation, folder: str | os.PathLike[str], add: bool = False) -> Path:
    """Write a federation to a new folder: ``clients/``, an .npz file of rows for each, and an index with their digests.

    With ``add`` the clients join those that are in the folder: so a federation that fits in no memory is written part by part.
    Parts must be alike, down to the names of the classes.
    """
    where = Path(folder).expanduser().absolute()
    if add and not (where / INDEX).exists():
        add = False
    if not add and where.exists() and (not where.is_dir() or any(where.iterdir())):
        raise InvalidArgument(f"{where} is not empty; give a new folder (or add=True, for more clients of the same kind)")
    if federation.shards is not None:
        raise InvalidArgument(f"the rows are in shards already, {federation.shards.folder}; copy that folder")
    about = {"format": FORMAT, **_about(federation)}
    earlier: dict[str, Any] = {"clients": [], "labels": 0, "facts": {}, "notes": []}
    if add:
        earlier = _alike(read_index(where), about, federation, where)
    if federation.public is not None and not add:
        _write(where / "public.npz", {"x": federation.public})
    clients = [_client(federation, i, where, len(earlier["clients"]) + i) for i in range(len(federation))]
    facts = {name: [*earlier["facts"].get(name, ()), *values.tolist()] for name, values in federation.facts.items()}
    index = {
        **about,
        "labels": max(earlier["labels"], federation.labels),
        "facts": facts,
        "notes": list(dict.fromkeys([*earlier["notes"], *_notes(federation)])),
        "clients": _widened([*earlier["clients"], *clients]),
    }
    files.write_json(where / INDEX, index)  # last: a folder that has one is whole
    return where


def _about(federation: Federation) -> dict[str, Any]:
    """Return what the index says of all clients alike."""
    blocks = {"x": federation.train.x, "y": federation.train.y, "weights": federation.train.weights}
    forms = {name: _form(block) for name, block in blocks.items() if block is not None}
    written = {name: getattr(federation, name) for name in ("schema", "vocabulary", "packing")}
    public = None if federation.public is None else _packed({"x": federation.public})
    return {
        "name": federation.name,
        "kind": str(federation.kind),
        "parts": [part for part in PARTS if getattr(federation, part) is not None],
        "forms": forms,
        "classes": list(federation.classes),
        "tokens": federation.tokens,
        "public": None if public is None else {"sha256": hashlib.sha256(public).hexdigest(), "bytes": len(public)},
        **{name: None if value is None else value.to_json() for name, value in written.items()},
    }


def _form(block: Tensor) -> dict[str, Any]:
    return {"shape": list(block.shape[1:]), "dtype": str(block.dtype).removeprefix("torch.")}


def _notes(federation: Federation) -> list[str]:
    generated = federation.truth is not None or any(
        split is not None and split.kinds is not None for split in (federation.train, federation.test, federation.val)
    )
    return [*federation.notes, *([UNKNOWN] if generated else [])]


def _alike(index: dict[str, Any], about: Mapping[str, Any], federation: Federation, where: Path) -> dict[str, Any]:
    """Return an index to which clients may be added; what does not fit is refused by name."""
    for key in SAME:
        if index[key] != about[key]:
            raise InvalidArgument(f"the clients in {where} have another {key} than these; give parts of one federation")
    if set(index["facts"]) != set(federation.facts):
        raise InvalidArgument(f"the clients in {where} have other facts than these; give parts of one federation")
    there = {client["name"] for client in index["clients"]}
    for name in federation.names:
        if name in there:
            raise InvalidArgument(f"there is a client {name!r} in {where} already; give every client a name of its own")
    return index


def _client(federation: Federation, i: int, where: Path, number: int) -> dict[str, Any]:
    """Write a client's rows and return its entry in the index."""
    blocks: dict[str, Tensor] = {}
    splits: dict[str, Split] = {part: split for part in PARTS if (split := getattr(federation, part)) is not None}
    for part, split in splits.items():
        blocks[f"{part}_x"], blocks[f"{part}_y"] = split.client(i)
    train = federation.train
    if train.weights is not None:
        blocks["train_weights"] = train.weights[slice(*train.offsets[i : i + 2].tolist())]
    file = f"clients/{number // EACH:04d}/{number:07d}.npz"
    counts = None
    if federation.kind.softmax and not federation.per_position:
        counts = torch.bincount(blocks["train_y"], minlength=federation.labels).tolist()
    rows = {part: int(split.sizes[i]) for part, split in splits.items()}
    return {"name": federation.names[i], "file": file, "sha256": _write(where / file, blocks), "rows": rows, "counts": counts}


def _widened(clients: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries with a count for every class that any client has."""
    if clients[0]["counts"] is None:
        return clients
    wide = max(len(client["counts"]) for client in clients)
    return [{**client, "counts": client["counts"] + [0] * (wide - len(client["counts"]))} for client in clients]


def _write(path: Path, blocks: Mapping[str, Tensor]) -> str:
    """Write tensors and return the digest of the file, which the index is to have: one that is cut short shows by it."""
    content = _packed(blocks)
    with files.explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.open_anew(path) as file:
            file.write(content)
    return hashlib.sha256(content).hexdigest()


def _packed(blocks: Mapping[str, Tensor]) -> bytes:
    """Return tensors as an .npz file without a date, so that the same rows have the same digest."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, block in blocks.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(block.numpy()), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), member.getvalue())
    return buffer.getvalue()
