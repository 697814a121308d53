"""Unlabelled rows that everyone may see, brought to the shape of the clients' rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.data import files, rng
from fedtailor.data.federation import Federation
from fedtailor.data.pool import Pool
from fedtailor.errors import InvalidArgument, InvalidData, nearest


def with_public(
    federation: Federation,
    spec: str,
    pools: Mapping[str, Callable[..., Pool]],
    data_dir: files.Place | None = None,
    seed: int = 0,
) -> Federation:
    """The federation with public rows from ``NAME`` or ``NAME:ROWS`` (drawn by the seed): a set of images, or a .npy file."""
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
    said = f"{len(x)} public rows without labels are from {name}{note}."
    recipe: dict[str, Any] | None = None
    if federation.recipe is not None:
        where = str(Path(name).expanduser().absolute()) if name.endswith(".npy") else name
        recipe = {**federation.recipe, "public": f"{where}:{count}" if count else where}
    return replace(federation, public=x, notes=(*federation.notes, said), recipe=recipe)


def fitted(rows: Tensor, like: Tensor) -> tuple[Tensor, str]:
    """(rows in the shape of ``like``'s, what was done): images are resized, grey and colour turned into each other."""
    have, want = tuple(rows.shape[1:]), tuple(like.shape[1:])
    if have == want:
        return rows, ""
    if len(have) not in (2, 3) or len(want) not in (2, 3):
        raise InvalidData(
            f"public rows have shape {have} but the clients' have {want}, and only images can be resized; give rows of that shape"
        )
    x = rows if len(have) == 3 else rows.unsqueeze(1)
    channels, size = (want[0] if len(want) == 3 else 1), list(want[-2:])
    done = []
    if x.shape[1] != channels:
        if {x.shape[1], channels} != {1, 3}:
            raise InvalidData(f"public images have {x.shape[1]} channels but the clients' have {channels}; give as many")
        x = x.mean(1, keepdim=True) if channels == 1 else x.expand(-1, 3, -1, -1)
        done.append("made grey" if channels == 1 else "in three equal colours")
    if list(x.shape[-2:]) != size:
        done.append(f"resized from {x.shape[2]}x{x.shape[3]} to {size[0]}x{size[1]}")
        x = F.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)
    return x.reshape(len(x), *want).contiguous(), f", {' and '.join(done)}" if done else ""
