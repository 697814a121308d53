"""A pooled data set and how it is dealt out to clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data import partition as deal
from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class Pool:
    """Rows x and class labels y before there are clients.

    ``owner`` and ``domain`` name, where the set knows them, who made each row and where it comes from. Bytes in x are
    divided by 255 once they are floats.
    """

    name: str
    x: NDArray[Any]
    y: NDArray[np.int64]
    classes: Sequence[str] = ()
    owner: NDArray[np.str_] | None = None
    domain: NDArray[np.str_] | None = None
    notes: tuple[str, ...] = ()


def dealt(
    pool: Pool,
    clients: int | None = None,
    partition: str = "iid",
    seed: int = 0,
    test_share: float = 0.25,
    val_share: float = 0.15,
    min_samples: int | None = None,
    flat: bool = False,
) -> Federation:
    """A pooled data set dealt out to clients, each with train, validation and test rows of the same label mix.

    ``clients`` is 10 unless given; for ``natural`` and ``domain`` it is all there are.
    """
    shares = parts_of(test_share, val_share)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise InvalidArgument(f"seed must be a whole number from 0, not {seed!r}")
    if min_samples is not None:
        deal.whole("min_samples", min_samples)
    least = 2 * len(shares) if min_samples is None else max(min_samples, len(shares))
    rows, notes = _clients(pool, clients, partition, seed, least)
    x = pool.x.reshape(len(pool.x), -1) if flat else pool.x
    parts: list[list[tuple[NDArray[Any], NDArray[np.int64]]]] = [[] for _ in shares]
    for i, (name, mine) in enumerate(rows.items()):
        # a numbered client draws by its number, a named one by its name: leaving others out changes nothing for it
        key = i if name == str(i) else rng.purpose(name)
        for part, its in zip(parts, deal.split(pool.y[mine], shares, rng.generator(seed, "split", key)), strict=True):
            part.append((x[mine[its]], pool.y[mine[its]]))
    name = f"{pool.name}/{partition}"
    fed = Federation.from_arrays(*parts, names=list(rows), name=name, task="classification", classes=pool.classes)
    if pool.x.dtype == np.uint8:
        for split in (fed.train, fed.test, fed.val):
            if split is not None:
                split.x.div_(255)  # in place: nobody else has seen these rows yet
    return replace(fed, notes=(*pool.notes, *notes))


def parts_of(test_share: float, val_share: float) -> tuple[float, ...]:
    """Shares of train, test and, unless it is zero, validation."""
    if not 0 < test_share < 1 or not 0 <= val_share < 1 or test_share + val_share >= 1:
        raise InvalidArgument(f"test_share={test_share} and val_share={val_share} leave no rows to train on")
    return (1 - test_share - val_share, test_share) + ((val_share,) if val_share else ())


def left_out(few: int, least: int) -> list[str]:
    """The note on clients that are too small, if there are any."""
    who = "1 client is" if few == 1 else f"{few} clients are"
    return [f"{who} left out, with fewer than {least} rows."] if few else []


def _clients(pool: Pool, clients: int | None, rule: str, seed: int, least: int) -> tuple[deal.Owned, list[str]]:
    if rule == "natural":
        owner = pool.domain if pool.owner is None else pool.owner
        if owner is None:
            raise InvalidArgument(f"{pool.name} has no clients of its own; use partition='iid', 'dirichlet:0.3', 'classes:2' ...")
        rows = deal.natural(owner, clients, seed, least)
        few = sum(len(mine) < least for mine in deal.grouped(owner).values())
        return rows, left_out(few, least)
    if rule == "domain":
        if pool.domain is None:
            raise InvalidArgument(f"{pool.name} comes from one domain; use partition='iid', 'dirichlet:0.3', 'classes:2' ...")
        return deal.domains(pool.domain, clients, seed, least), []
    parts = deal.partition(rule, pool.y, 10 if clients is None else clients, seed, least)
    return {str(i): mine for i, mine in enumerate(parts)}, []
