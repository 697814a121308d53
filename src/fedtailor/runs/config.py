"""What a run was asked to do, as plain values: written to config.toml, and compared when it is resumed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms import origin
from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import settings, spec
from fedtailor.data.federation import Federation

# options of the data that are flags of their own; the others go in the table "with"
DATA_FLAGS = (
    "client",
    "label",
    "clients",
    "partition",
    "features",
    "drop",
    "split",
    "standardize",
    "missing",
    "na",
    "keep_na",
    "merge_clients",
    "merge_labels",
    "columns",
    "row_weights",
    "min_samples",
    "test_share",
    "val_share",
    "data_dir",
    "public",
)


def describe(algorithm: Algorithm, federation: Federation, model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration: names are those of the flags. Without ``data`` (or ``model``) it was made in Python, from
    objects; a checksum of the rows then says from which."""
    recipe = dict(federation.recipe or {})
    out: dict[str, Any] = {"command": "run", "method": spec(algorithm)}
    if "data" in recipe:
        out["data"] = recipe.pop("data")
    else:
        out["data_sha256"] = fingerprint(federation)
    if "seed" in recipe:
        out["data_seed"] = recipe.pop("seed")
    if isinstance(model, str):
        out["model"] = model
    out |= {key: recipe.pop(key) for key in DATA_FLAGS if key in recipe}
    task = recipe.pop("task", None)
    out |= options
    out["task"] = out.get("task") or task
    out = {key: plain(value) for key, value in out.items() if value is not None and value != ()}
    if recipe:
        out["with"] = plain(recipe)
    return out | {"set": settings(algorithm)}


def identity(
    algorithm: Algorithm,
    federation: Federation,
    start: Any,
    options: Mapping[str, Any],
    frozen: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Return what must be the same for a resumed run to be the same run.

    ``options`` are those that change its numbers, ``frozen`` is the frozen part of the model.
    """
    return {
        "method": _method(algorithm),
        **settings(algorithm),
        **{key: plain(value) for key, value in options.items() if (key, value) != ("backbone", None)},
        "data": fingerprint(federation),
        "start": hashlib.sha256(tree.pack(start)).hexdigest(),
        **({"frozen part": hashlib.sha256(tree.pack(frozen)).hexdigest()} if frozen else {}),
    }


def _method(algorithm: Algorithm) -> str:
    """Return the class by name, and its source where it is not ours: a file that was moved is still the same method."""
    source = origin.of(type(algorithm))
    name = type(algorithm).__name__
    return name if source is None else f"{name}@{source.fingerprint or origin.NO_FILE}"


def content(path: str | os.PathLike[str] | None) -> str | None:
    """Return a checksum of a file, which may since have moved; a word that is no file is itself."""
    if path is None or not os.path.isfile(path):
        return None if path is None else str(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(federation: Federation) -> str:
    """Return a checksum of every client's name and rows."""
    checksum = hashlib.sha256("\0".join(federation.names).encode())
    if federation.shards is not None:  # of their files: nobody here reads the rows
        checksum.update(f"{federation.shards.digest} {federation.train.x.dtype}".encode())
    for split in (federation.train, federation.test, federation.val) if federation.shards is None else ():
        if split is not None:
            checksum.update(split.offsets.tobytes())
            for rows in (split.x, split.y):
                checksum.update(str((tuple(rows.shape), rows.dtype)).encode())
                checksum.update(_bytes(rows))
    if federation.train.weights is not None and federation.shards is None:
        checksum.update(_bytes(federation.train.weights))
    if federation.packing is not None:
        checksum.update(repr(federation.packing.to_json()).encode())
    if federation.public is not None:
        checksum.update(_bytes(federation.public))
    for name, values in sorted(federation.facts.items()):
        checksum.update(name.encode() + np.ascontiguousarray(values).tobytes())
    return checksum.hexdigest()


def plain(value: Any) -> Any:
    """Numbers, words, lists and tables only."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _bytes(rows: Tensor) -> memoryview:
    return np.ascontiguousarray(rows.numpy()).reshape(-1).view(np.uint8).data
