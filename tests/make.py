"""Small federations, batches and modules that several test files build on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtailor import Federation, Round
from fedtailor.data import Batches


def pairs(
    sizes: Sequence[int], d: int = 3, kind: str = "classification", seed: int = 0, classes: int = 2
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Normal features; labels 0..classes-1, or targets from a linear map."""
    draw = np.random.default_rng(seed)
    out = []
    for n in sizes:
        x = draw.normal(size=(n, d))
        y = x.sum(1) + draw.normal(size=n) if kind == "regression" else draw.integers(0, classes, n)
        out.append((x, y))
    return out


def federation(
    sizes: Sequence[int],
    d: int = 3,
    kind: str = "classification",
    seed: int = 0,
    names: Sequence[str] | None = None,
    val: bool = False,
) -> Federation:
    test = pairs([4] * len(sizes), d, kind, seed + 1)
    more = pairs([3 + i for i in range(len(sizes))], d, kind, seed + 2) if val else None
    return Federation.from_arrays(pairs(sizes, d, kind, seed), test, more, names=names, task=kind)


def numbered(sizes: Sequence[int], names: Sequence[str] | None = None, val: bool = False) -> Federation:
    """Clients whose rows say who they are: x = (client, row), y = 1000 client + row; in float64."""

    def split(counts: Sequence[int], shift: int) -> list[tuple[np.ndarray, np.ndarray]]:
        rows = [(np.full(n, float(i)), np.arange(n) + float(shift)) for i, n in enumerate(counts)]
        return [(np.stack([who, row], 1), 1000 * who + row) for who, row in rows]

    return Federation.from_arrays(
        split(sizes, 0),
        split([1] * len(sizes), 500),
        split([1 + i % 3 for i in range(len(sizes))], 700) if val else None,
        names=names,
        task="regression",
    )


def the_round(**known: Any) -> Round:
    """The first and only round of a federation of one client, but for what is said of it."""
    first = {"number": 0, "rounds": 1, "clients": 1, "cohort": 1, "mass": 1.0, "seed": 0, "exchange": 0}
    return Round(**{**first, "weights": torch.ones(1), "ranks": torch.zeros(1, dtype=torch.int64), **known})


def batches(x: Tensor, y: Tensor, index: Sequence[Sequence[int]], first_key: int = 0) -> Batches:
    """One client's batches with the given rows in each step (all steps equally long)."""
    rows = np.array(index, np.int64)
    return Batches(x, y, rows, np.arange(first_key, first_key + len(rows), dtype=np.int64))


def seeded(build: type[nn.Module] | object, *args: object, seed: int = 0) -> nn.Module:
    """``build(*args)`` in float64 with weights that depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(*args).double()  # type: ignore[operator]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
