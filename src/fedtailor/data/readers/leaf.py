"""LEAF json: its users are the clients, with or without their own train and test rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.partition import check_positive_int, choose_owners, split
from fedtailor.data.pool import PooledData, dealt
from fedtailor.data.readers import files
from fedtailor.errors import InvalidArgument, InvalidData


def leaf(
    path: str,
    clients: int | None = None,
    seed: int = 0,
    test_share: float = 0.25,
    val_share: float = 0.15,
    min_samples: int | None = None,
    shape: Sequence[int] | None = None,
) -> Federation:
    """Read LEAF json (FEMNIST and the like): the clients are its users; its own train and test split is used if it has one.

    ``shape`` is one row's, for instance (1, 28, 28); without it rows stay as they are.
    """
    folder = Path(path).expanduser().absolute()
    parts = files.read_leaf(folder)
    if shape is not None:
        parts = {part: {u: (_shaped(x, shape, folder), y) for u, (x, y) in users.items()} for part, users in parts.items()}
    if "all" in parts:
        users = parts["all"]
        sizes = [len(y) for _, y in users.values()]
        y = np.concatenate([y for _, y in users.values()])
        _classes(folder, y)
        pool = PooledData(
            "leaf", _joined(folder, [x for x, _ in users.values()]), y.astype(np.int64), owner=np.repeat(list(users), sizes)
        )
        return replace(dealt(pool, clients, "natural", seed, test_share, val_share, min_samples), name=f"leaf/{folder.name}")
    return _split_leaf(folder, parts, clients, seed, val_share, min_samples)


def _split_leaf(
    folder: Path, parts: Mapping[str, Any], clients: int | None, seed: int, val_share: float, min_samples: int | None
) -> Federation:
    """Use LEAF's own train and test rows; the validation rows come out of train."""
    train, test = parts["train"], parts["test"]
    if set(train) != set(test):
        raise InvalidData(f"{folder} has other users in test than in train; split it by sample, so that every user has both")
    if not 0 <= val_share < 1:
        raise InvalidArgument(f"val_share={val_share} leaves no rows to train on; give a share of the train rows below 1")
    if min_samples is not None:
        check_positive_int("min_samples", min_samples)
    min_rows = max(2 if val_share else 1, min_samples or 1)
    names = choose_owners(list(train), [len(train[user][1]) for user in train], clients, seed, min_rows)
    _classes(folder, np.concatenate([users[user][1] for users in (train, test) for user in names]))
    if not val_share:
        return Federation.from_arrays(
            [train[u] for u in names], [test[u] for u in names], names=names, name=f"leaf/{folder.name}"
        )
    train_pairs: list[tuple[Any, Any]] = []
    val_pairs: list[tuple[Any, Any]] = []
    for user in names:
        x, y = train[user]
        rows = split(y, (1 - val_share, val_share), rng.generator(seed, "split", rng.purpose(user)))
        for pairs, chosen in zip((train_pairs, val_pairs), rows, strict=True):
            pairs.append((x[chosen], y[chosen]))
    return Federation.from_arrays(train_pairs, [test[u] for u in names], val_pairs, names=names, name=f"leaf/{folder.name}")


def _classes(folder: Path, y: Any) -> None:
    if y.ndim != 1 or y.dtype.kind not in "iub" or y.min(initial=0) < 0:
        raise InvalidData(f"the labels in {folder} are not classes 0, 1, 2, ...; read them with Federation.from_arrays")


def _joined(folder: Path, rows: Sequence[Any]) -> Any:
    try:
        return np.concatenate(rows)
    except ValueError as error:
        raise InvalidData(f"the users in {folder} have rows of different shapes; give all the same") from error


def _shaped(x: Any, shape: Sequence[int], folder: Path) -> Any:
    if int(np.prod(shape)) != int(np.prod(x.shape[1:])):
        raise InvalidArgument(
            f"rows of {folder} hold {int(np.prod(x.shape[1:]))} numbers, which cannot take the shape {tuple(shape)}"
        )
    return x.reshape(len(x), *shape)
