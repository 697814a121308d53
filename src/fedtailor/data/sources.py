"""Federations by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from fedtailor.data import rng, synthetic
from fedtailor.data.federation import Federation
from fedtailor.data.partition import partition as deal
from fedtailor.data.partition import split
from fedtailor.errors import InvalidArgument


def digits(
    clients: int = 10,
    partition: str = "iid",
    seed: int = 0,
    test_share: float = 0.25,
    val_share: float = 0.15,
    images: bool = False,
) -> Federation:
    """scikit-learn's 1,797 handwritten digits, 8x8, values in [0, 1]."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    return parted("digits", x.reshape(-1, 8, 8) if images else x, y, clients, partition, seed, test_share, val_share)


def parted(
    name: str, x: Any, y: Any, clients: int, rule: str, seed: int, test_share: float = 0.25, val_share: float = 0.15
) -> Federation:
    """A pooled data set dealt out to clients, each with train, validation and test rows of the same label mix."""
    if not 0 < test_share < 1 or not 0 <= val_share < 1 or test_share + val_share >= 1:
        raise InvalidArgument(f"test_share={test_share} and val_share={val_share} leave no rows to train on")
    shares = (1 - test_share - val_share, test_share) + ((val_share,) if val_share else ())
    parts: list[list[tuple[Any, Any]]] = [[] for _ in shares]
    for i, rows in enumerate(deal(rule, y, clients, seed, least=2 * len(shares))):
        for part, mine in zip(parts, split(y[rows], shares, rng.generator(seed, "split", i)), strict=True):
            part.append((x[rows[mine]], y[rows[mine]]))
    return Federation.from_arrays(*parts, name=f"{name}/{rule}")


SOURCES: dict[str, Callable[..., Federation]] = {
    "digits": digits,
    "clup-logistic": synthetic.clup_logistic,
    "clup-regression": synthetic.clup_regression,
    "minimax-logistic": synthetic.minimax_logistic,
}


def load(name: str, **options: Any) -> Federation:
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"the data sets are {', '.join(SOURCES)}"
        raise InvalidArgument(f"unknown data set {name!r}; {hint}")
    known = inspect.signature(SOURCES[name]).parameters
    for option in options:
        if option not in known:
            raise InvalidArgument(f"data set {name!r} has no option {option!r}; use {', '.join(known)}")
    return SOURCES[name](**options)
