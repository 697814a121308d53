"""A directory of .npy files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtailor.data.pool import PooledData
from fedtailor.data.readers import files
from fedtailor.errors import InvalidArgument, InvalidData


def npy(path: str) -> PooledData:
    """Read a directory with x.npy (rows) and y.npy (class labels), and optionally client.npy (the owner of each row)."""
    folder = Path(path).expanduser().absolute()
    for name in ("x.npy", "y.npy"):
        if not (folder / name).is_file():
            raise InvalidArgument(f"{folder} has no {name}; save the rows as x.npy and their labels as y.npy")
    x, y = files.read_pair(folder / "x.npy", folder / "y.npy")
    owner = None
    if (folder / "client.npy").is_file():
        owner = files.read_npy(folder / "client.npy").astype(np.str_)
        if owner.shape != y.shape:
            raise InvalidData(f"{folder / 'client.npy'} has shape {owner.shape}; give one client per row, {len(y)} of them")
    return PooledData(f"npy/{folder.name}", x, y, owner=owner)
