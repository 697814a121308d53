"""How a run goes on: from its first rounds and the point it ends at, without playing the rounds between.

Near a minimum of smooth clients' risks FedCLUP is a linear iteration, so the distance e_t = y_t - y_end of anything linear in the
models (a linear model's predictions, its parameters) is a sum of a few terms rate^t v. The rates are found on a grid so that the
terms fit the rounds seen; the v are then combinations of those rounds, and so is every round to come. It is an estimate: slow
terms that are still small in the rounds seen are missed, and a network is linear only roughly.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]

RATES = np.concatenate([[0.0], 1 - 1 / np.geomspace(1.2, 400, 40)])  # terms that last between one round and four hundred
LEAST_RATIO = 2.0  # of how long two terms last: terms that are nearer cancel each other
SLOWEST = 0.995  # rate above which changes do not count as shrinking


def ahead(seen: Tensor, end: Tensor, rounds: int) -> Numbers:
    """[rounds, len(seen)]: y after round len(seen) - 1 + t is end + (row t - 1) @ (seen - end).

    ``seen`` is [rounds in a row, numbers]. Three terms where enough rounds were seen, fewer where a fit with three would move
    away from the end.
    """
    errors = (seen - end).double()
    gram = (errors @ errors.T).numpy()
    last, length = gram[-1, -1], len(gram)
    out = np.zeros((rounds, length))
    if rounds == 0 or last <= 0:
        return out
    for terms in range(min(3, max(1, length // 2)), 0, -1):
        out = _combinations(gram, _fit(gram, terms), rounds)
        if (np.einsum("ti,ij,tj->t", out, gram, out) <= last * (1 + 1e-9)).all():
            return out
    out[:, -1] = 1.0  # no term fits: it stays where it is
    return out


def _fit(gram: Numbers, terms: int) -> Numbers:
    """Return the rates whose terms explain most of the rounds, each round counted relative to its own norm."""
    scale = _scale(gram)
    relative = gram * scale[:, None] * scale
    powers = RATES ** np.arange(len(gram))[:, None]
    choices = np.array(list(itertools.combinations(range(len(RATES)), terms)))
    lasting = 1 - RATES[choices]
    choices = choices[(lasting[:, :-1] >= LEAST_RATIO * lasting[:, 1:]).all(1)]
    bases = np.linalg.qr((powers * scale[:, None])[:, choices].transpose(1, 0, 2))[0]
    explained = np.einsum("cik,ij,cjk->c", bases, relative, bases)
    return RATES[choices[int(explained.argmax())]]


def _combinations(gram: Numbers, rates: Numbers, rounds: int) -> Numbers:
    """Return the rounds to come as combinations of those seen; what the terms miss of the last round fades as the slowest of
    them."""
    scale, count = _scale(gram), len(gram)
    powers = rates ** np.arange(count)[:, None]
    parts = np.linalg.pinv(powers * scale[:, None]) * scale  # v = parts @ errors
    missed = np.eye(count)[-1] - powers[-1] @ parts
    steps = np.arange(1, rounds + 1)[:, None]
    return rates ** (count - 1 + steps) @ parts + rates.max() ** steps * missed


def _scale(gram: Numbers) -> Numbers:
    return 1 / np.sqrt(np.maximum(np.diag(gram), 1e-12 * gram[0, 0]))


def distance_left(before: Tensor, middle: Tensor, now: Tensor) -> float:
    """Return how far ``now`` is from where three rounds in a row lead to, if the changes go on shrinking as they did; infinity
    where they do not shrink."""
    first, second = float(torch.dist(middle, before)), float(torch.dist(now, middle))
    if second == 0:
        return 0.0
    rate = second / first if first > 0 else np.inf
    return second * rate / (1 - rate) if rate < SLOWEST else np.inf
