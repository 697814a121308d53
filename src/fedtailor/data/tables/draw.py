"""Random splits into train, test and val rows, class by class, for every client by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data import rng
from fedtailor.data.columns import Ints
from fedtailor.data.schema import BLOCK
from fedtailor.data.tables.threads import parallel_map


def draw_all(
    sizes: Ints, stratum: NDArray[Any], names: Sequence[str], strata: Sequence[str], shares: Sequence[float], seed: int
) -> NDArray[np.int8]:
    """Run ``draw_parts`` on some clients at a time: they do not depend on each other, and their rows stay in the cache."""
    ends = np.cumsum(sizes)
    firsts = np.unique(np.searchsorted(ends, np.arange(0, int(ends[-1]), 2 * BLOCK), "right"))
    bounds = [*firsts.tolist(), len(sizes)]

    def draw_block(i: int) -> NDArray[np.int8]:
        a, b = bounds[i], bounds[i + 1]
        block_stratum = stratum[int(ends[a] - sizes[a]) : int(ends[b - 1])]
        return draw_parts(sizes[a:b], block_stratum, names[a:b], strata, shares, seed)

    return np.concatenate(parallel_map(draw_block, range(len(firsts)), len(stratum)))


def draw_parts(
    sizes: Ints, stratum: NDArray[Any], names: Sequence[str], strata: Sequence[str], shares: Sequence[float], seed: int
) -> NDArray[np.int8]:
    """Return the part of every row, drawn by (seed, client's name, place among the client's rows): nobody else's rows matter.

    Rows come client after client, ``sizes`` of each. A client's rows of a class are shuffled and spread evenly over [0, 1);
    cutting there keeps the classes' shares in every part and gives every part a row.
    """
    total, kinds = int(sizes.sum()), len(strata)
    keys = np.fromiter((rng.purpose(name) for name in names), np.uint64, len(names))
    group = np.repeat(np.arange(len(names)) * kinds, sizes) + stratum
    rank = _ranks(sizes)
    random_word = rng.mix(np.repeat(rng.mix(seed, rng.purpose("split"), keys), sizes), rank) >> np.uint64(40)
    shuffled = sort_by(group, random_word)
    present, counts = np.unique(group, return_counts=True) if len(names) * kinds > total else _counted(group)
    labels = np.fromiter((rng.purpose(name) for name in strata), np.uint64, kinds)
    shift = rng.mix(seed, rng.purpose("place"), keys[present // kinds], labels[present % kinds]) / 2.0**64
    spot = (_ranks(counts) + np.repeat(shift, counts)) * np.repeat(2.0**24 / counts, counts)
    spread = shuffled[sort_by(np.repeat(present // kinds, counts), np.minimum(spot, 2**24 - 1).astype(np.uint64))]
    part = np.zeros(total, np.int8)
    for i, share in enumerate(np.cumsum(shares)[:-1] / sum(shares)):
        cut = np.clip(np.round(share * sizes).astype(np.int64), i + 1, sizes - len(shares) + i + 1)
        part += rank >= np.repeat(cut, sizes)
    out = np.empty(total, np.int8)
    out[spread] = part
    return out


def _ranks(sizes: Ints) -> Ints:
    """Return 0, 1, ... within each of consecutive groups."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _counted(codes: Ints) -> tuple[Ints, Ints]:
    counts = np.bincount(codes)
    present = np.flatnonzero(counts)
    return present, counts[present]


def sort_by(major: Ints, minor: NDArray[np.uint64]) -> Ints:
    """Return the positions sorted by ``major``, then by ``minor`` (24 bits), then by position."""
    low = max(len(major) - 1, 1).bit_length()
    if int(major.max(initial=0)).bit_length() + 24 + low > 64:
        return np.lexsort((minor, major))
    # one word holds all three, and sorting words is several times faster than an argsort
    word = (major.astype(np.uint64) << np.uint64(24 + low)) | (minor << np.uint64(low)) | np.arange(len(major), dtype=np.uint64)
    word.sort()
    return (word & np.uint64(2**low - 1)).astype(np.int64)
