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
from fedtailor.task.kinds import CLASSIFICATION


@dataclass(frozen=True, eq=False)
class PooledData:
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
    pool: PooledData,
    clients: int | None = None,
    partition: str = "iid",
    seed: int = 0,
    test_share: float = 0.25,
    val_share: float = 0.15,
    min_samples: int | None = None,
    flat: bool = False,
) -> Federation:
    """Deal a pooled data set out to clients, each with train, validation and test rows of the same label mix.

    ``clients`` defaults to 10; for ``natural`` and ``domain``, to all there are.
    """
    shares = parts_of(test_share, val_share)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise InvalidArgument(f"seed must be a whole number from 0, not {seed!r}")
    if min_samples is not None:
        deal.check_positive_int("min_samples", min_samples)
    min_rows = 2 * len(shares) if min_samples is None else max(min_samples, len(shares))
    rows_by_client, notes = _clients(pool, clients, partition, seed, min_rows)
    x = pool.x.reshape(len(pool.x), -1) if flat else pool.x
    pairs: list[list[tuple[NDArray[Any], NDArray[np.int64]]]] = [[] for _ in shares]
    for i, (name, rows) in enumerate(rows_by_client.items()):
        # a numbered client draws by its number, a named one by its name: leaving others out changes nothing for it
        key = i if name == str(i) else rng.purpose(name)
        for part_pairs, chosen in zip(pairs, deal.split(pool.y[rows], shares, rng.generator(seed, "split", key)), strict=True):
            part_pairs.append((x[rows[chosen]], pool.y[rows[chosen]]))
    name = f"{pool.name}/{partition}"
    fed = Federation.from_arrays(*pairs, names=list(rows_by_client), name=name, task=CLASSIFICATION, classes=pool.classes)
    if pool.x.dtype == np.uint8:
        for split in (fed.train, fed.test, fed.val):
            if split is not None:
                split.x.div_(255)  # in place: nobody else has seen these rows yet
    return replace(fed, notes=(*pool.notes, *notes))


def parts_of(test_share: float, val_share: float) -> tuple[float, ...]:
    """Return the shares of the train, test and, unless that is zero, validation rows."""
    if not 0 < test_share < 1 or not 0 <= val_share < 1 or test_share + val_share >= 1:
        raise InvalidArgument(f"test_share={test_share} and val_share={val_share} leave no rows to train on")
    return (1 - test_share - val_share, test_share) + ((val_share,) if val_share else ())


def left_out(count: int, min_rows: int) -> list[str]:
    """Return the note on clients that are too small, if there are any."""
    subject = "1 client is" if count == 1 else f"{count} clients are"
    return [f"{subject} left out, with fewer than {min_rows} rows."] if count else []


def _clients(pool: PooledData, clients: int | None, rule: str, seed: int, min_rows: int) -> tuple[deal.RowsByName, list[str]]:
    if rule == "natural":
        owner = pool.domain if pool.owner is None else pool.owner
        if owner is None:
            raise InvalidArgument(f"{pool.name} has no clients of its own; use partition='iid', 'dirichlet:0.3', 'classes:2' ...")
        rows = deal.natural(owner, clients, seed, min_rows)
        too_small = sum(len(client_rows) < min_rows for client_rows in deal.grouped(owner).values())
        return rows, left_out(too_small, min_rows)
    if rule == "domain":
        if pool.domain is None:
            raise InvalidArgument(f"{pool.name} comes from one domain; use partition='iid', 'dirichlet:0.3', 'classes:2' ...")
        return deal.domains(pool.domain, clients, seed, min_rows), []
    parts = deal.partition(rule, pool.y, 10 if clients is None else clients, seed, min_rows)
    return {str(i): client_rows for i, client_rows in enumerate(parts)}, []
