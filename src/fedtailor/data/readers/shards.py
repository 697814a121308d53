"""A folder of shards: an index, and a file of rows for every client (``save_shards`` writes one)."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.federation import Federation
from fedtailor.data.schema import Schema
from fedtailor.data.split import Split
from fedtailor.data.unread import PARTS, Shards, Unread, unpacked
from fedtailor.data.vocabulary import Vocabulary
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.task.kinds import kind_of
from fedtailor.task.packing import Packing

INDEX, FORMAT = "index.json", "fedtailor-shards/1"
DTYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.float64, torch.int64)}


def is_folder(path: Path) -> bool:
    """Return whether a directory holds shards."""
    try:
        with (path / INDEX).open("rb") as file:
            return FORMAT.encode() in file.read(100)
    except OSError:
        return False


def from_shards(path: str | os.PathLike[str], read: bool = True) -> Federation:
    """Read a folder of shards, a file of rows for every client; a file that was changed is refused by its name.

    With ``read=False`` only the index is read: the rows are for the nodes of a cluster (``engine="ray"``), each of which reads
    the files of its clients.
    """
    folder = Path(path).expanduser().absolute()
    index = read_index(folder)
    try:
        federation = _unread(folder, index)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidData(f"{folder / INDEX} is no index of shards ({type(error).__name__}: {error}); save them anew") from error
    return federation.with_rows() if read else federation


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index of a folder of shards."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except FileNotFoundError:
        raise InvalidArgument(f"{folder} has no {INDEX}; make a folder of shards with save_shards(federation, folder)") from None
    except (OSError, ValueError) as error:
        raise InvalidData(
            f"{folder / INDEX} cannot be read ({error}); restore it from a copy, or save the shards anew"
        ) from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InvalidData(f"{folder / INDEX} is no index of shards that this version reads; save them anew")
    return index


def _unread(folder: Path, index: dict[str, Any]) -> Federation:
    """Return the federation of an index, whose rows are not here."""
    clients = index["clients"]
    for client in clients:
        if PurePosixPath(client["file"]).is_absolute() or ".." in PurePosixPath(client["file"]).parts:
            raise InvalidData(f"{folder / INDEX} names the file {client['file']!r}, which is not in the folder; save them anew")
    splits: dict[str, Any] = {part: _split(folder, index, part) for part in PARTS if part in clients[0]["rows"]}
    counts = None if clients[0]["counts"] is None else np.array([client["counts"] for client in clients], np.int64)
    names, files, digests = (tuple(str(client[key]) for client in clients) for key in ("name", "file", "sha256"))
    shards = Shards(str(folder), names, files, digests, counts)
    if len(set(shards.clients)) < len(shards.clients):
        raise InvalidData(f"{folder / INDEX} has two clients of one name; save the shards anew")
    more: dict[str, Any] = {key: None if index[key] is None else kind.from_json(index[key]) for key, kind in _WRITTEN.items()}
    return Federation(
        **splits,
        **more,
        public=None if index["public"] is None else _public(folder, index["public"]),
        names=shards.clients,
        kind=kind_of(index["kind"]),
        labels=int(index["labels"]),
        name=str(index["name"]),
        classes=tuple(index["classes"]),
        notes=tuple(index["notes"]),
        facts={name: np.array(values, np.float64) for name, values in index["facts"].items()},
        tokens=int(index["tokens"]),
        shards=shards,
    )


_WRITTEN: dict[str, Any] = {"schema": Schema, "vocabulary": Vocabulary, "packing": Packing}


def _split(folder: Path, index: dict[str, Any], part: str) -> Split:
    offsets = np.concatenate([[0], np.cumsum([int(client["rows"][part]) for client in index["clients"]])]).astype(np.int64)

    def block(name: str) -> Tensor:
        form = index["forms"][name]
        return Unread((int(offsets[-1]), *map(int, form["shape"])), DTYPES[form["dtype"]], str(folder))

    weights = block("weights") if part == "train" and "weights" in index["forms"] else None
    return Split(block("x"), block("y"), offsets, weights=weights)


def _public(folder: Path, entry: dict[str, Any]) -> Tensor:
    """Return the public rows, which everyone may see."""
    path = folder / "public.npz"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidData(f"{path} cannot be read ({error.strerror}); restore it from a copy") from error
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise InvalidData(f"{path} was changed or cut short (its checksum does not fit); restore it from a copy")
    return torch.from_numpy(unpacked(content, path, int(entry["bytes"]))["x"])
