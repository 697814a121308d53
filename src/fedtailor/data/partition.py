"""How one data set becomes many clients. Every client gets at least one row; the same seed gives the same clients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedtailor.data import rng
from fedtailor.errors import InvalidArgument

Rows = list[NDArray[np.int64]]


def partition(rule: str, y: NDArray[np.int64], clients: int, seed: int, least: int = 1) -> Rows:
    """Row numbers of every client. ``rule`` is ``iid`` or ``dirichlet:alpha`` (label shares drawn per class)."""
    if clients < 1 or clients * least > len(y):
        raise InvalidArgument(f"{clients} clients with at least {least} rows each need more than the {len(y)} rows there are")
    draw = rng.generator(seed, "partition")
    kind, _, option = rule.partition(":")
    if kind == "iid" and not option:
        return [np.sort(part) for part in np.array_split(draw.permutation(len(y)), clients)]
    if kind == "dirichlet":
        try:
            alpha = float(option)
        except ValueError:
            alpha = 0.0
        if not 0 < alpha < np.inf:
            raise InvalidArgument(f"cannot read {rule!r}; write for instance 'dirichlet:0.3' with a number above 0")
        return _dirichlet(y, clients, alpha, draw, least)
    raise InvalidArgument(f"unknown partition {rule!r}; use 'iid' or 'dirichlet:0.3'")


def _dirichlet(y: NDArray[np.int64], clients: int, alpha: float, draw: np.random.Generator, least: int) -> Rows:
    """Each class is dealt out by shares ~ Dir(alpha); then the poorest clients are filled up from the richest."""
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(y):
        rows = draw.permutation(np.flatnonzero(y == label))
        cuts = np.floor(np.cumsum(draw.dirichlet(np.full(clients, alpha)))[:-1] * len(rows) + 0.5).astype(int)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.extend(piece.tolist())
    while min(len(part) for part in parts) < least:
        poor, rich = min(parts, key=len), max(parts, key=len)
        poor.append(rich.pop())
    return [np.sort(np.array(part, np.int64)) for part in parts]


def split(y: NDArray[np.int64], shares: tuple[float, ...], draw: np.random.Generator) -> Rows:
    """Rows 0..len(y)-1 split by ``shares``, class by class where a class is large enough; no part is left empty."""
    if len(y) < len(shares):
        raise InvalidArgument(f"{len(y)} rows cannot be split in {len(shares)} parts; give the client more rows")
    order = np.concatenate([draw.permutation(np.flatnonzero(y == label)) for label in np.unique(y)])
    # every class is spread evenly over [0, 1): cutting there keeps the classes' shares in every part
    places = np.concatenate([(np.arange(c) + draw.random()) / c for c in np.unique(y, return_counts=True)[1]])
    order = order[np.argsort(places, kind="stable")]
    cuts = np.round(np.cumsum(shares)[:-1] / sum(shares) * len(y)).astype(int)
    cuts = np.array([min(max(cut, i + 1), len(y) - len(shares) + i + 1) for i, cut in enumerate(cuts)], int)
    return [np.sort(part) for part in np.split(order, np.maximum.accumulate(cuts))]
