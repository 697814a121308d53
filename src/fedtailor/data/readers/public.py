"""Unlabelled rows that everyone may see, brought to the shape of the clients' rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.pool import PooledData
from fedtailor.data.readers import files
from fedtailor.data.resize import fitted
from fedtailor.errors import InvalidArgument, InvalidData, nearest


def with_public(
    federation: Federation,
    spec: str,
    pools: Mapping[str, Callable[..., PooledData]],
    data_dir: files.Place | None = None,
    seed: int = 0,
) -> Federation:
    """Add public rows to a federation, from ``NAME`` or ``NAME:ROWS`` (drawn by the seed): a set of images, or a .npy file."""
    name, _, tail = spec.rpartition(":")
    name, count = (name, tail) if name and tail.isdigit() else (spec, "")
    if federation.recipe is not None and federation.recipe.get("data") == name:
        raise InvalidArgument(f"the clients' rows are from {name} themselves, test rows too; take public rows from another set")
    if name.endswith(".npy"):
        rows = files.read_npy(Path(name).expanduser())
    elif name in pools:
        takes = inspect.signature(pools[name]).parameters
        rows = pools[name](**({"data_dir": data_dir} if "data_dir" in takes else {})).x
    else:
        near = nearest(name, pools, "write NAME or NAME:ROWS, a .npy file or one of")
        raise InvalidArgument(f"unknown public data {spec!r}; {near}")
    if rows.dtype.kind not in "biuf" or rows.ndim < 2 or len(rows) == 0:
        raise InvalidData(
            f"{name} has no rows of numbers but an array of {rows.dtype}, shape {rows.shape}; give rows by features"
        )
    if count and not 1 <= int(count) <= len(rows):
        raise InvalidArgument(f"{name} has {len(rows)} rows, not {count}; write {name}:ROWS with 1 to {len(rows)}")
    if count:
        rows = rows[np.sort(rng.generator(seed, "public").choice(len(rows), int(count), replace=False))]
    x = torch.from_numpy(np.ascontiguousarray(rows)).to(torch.float32)
    x, note = fitted(x.div_(255) if rows.dtype == np.uint8 else x, federation.train.x)
    if not bool(torch.isfinite(x).all()):
        raise InvalidData(f"{name} has a value that is not finite (NaN or infinity); fill or drop it")
    public_note = f"{len(x)} public rows without labels are from {name}{note}."
    recipe: dict[str, Any] | None = None
    if federation.recipe is not None:
        where = str(Path(name).expanduser().absolute()) if name.endswith(".npy") else name
        recipe = {**federation.recipe, "public": f"{where}:{count}" if count else where}
    return replace(federation, public=x, notes=(*federation.notes, public_note), recipe=recipe)
