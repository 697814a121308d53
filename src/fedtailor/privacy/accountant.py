"""Epsilon of a client that took part in private descents, and the noise for an epsilon that is wanted.

A release is a sum of clipped gradients with Gaussian noise. A batch drawn by Poisson sampling may be released several times;
given the sample these are Gaussian mechanisms, which compose to one with 1/sqrt(releases) of the noise, and the sample amplifies
them together. Where batches are not Poisson samples, q = 1 and the steps are how often a row is used at most: no amplification.
Two data sets are neighbours if one has a row more (with q = 1: a row that counts for nothing in its place). That a client is
sampled for a round amplifies nothing here, since it is seen who takes part.

``prv`` composes the privacy loss distribution numerically, rounded so that epsilon is never too small (Koskela et al. 2020,
Doroshenko et al. 2022; the privacy random variable of Gopi et al. 2021); ``rdp`` adds Renyi divergences (Mironov et al. 2019),
quick and larger.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from fedtailor.errors import InvalidArgument

LARGE = 100.0  # an epsilon beyond this says "no privacy"; it is not worked out to more than the quick bound
MOST_NOISE = 1e4
DISTINCT = 24  # clients of that many kinds are accounted for exactly; of more, q and steps are rounded up
GRID = 1.04


class Spend(NamedTuple):
    """``steps`` batches, each holding a row with probability ``q``, each released ``releases`` times.

    A release with k times the noise counts as 1/k^2 of one, so ``releases`` need not be whole.
    """

    q: float
    steps: int
    releases: float = 1


Spends = tuple[Spend, ...]


def gathered(spends: Sequence[Spend]) -> Spends:
    """Return the same, sorted, in as few terms as possible: with q = 1 all releases are one Gaussian mechanism."""
    whole = sum(s.steps * s.releases for s in spends if s.q >= 1)
    parts: dict[tuple[float, float], int] = {}
    for s in spends:
        if s.q < 1 and s.steps and s.releases:
            parts[s.q, s.releases] = parts.get((s.q, s.releases), 0) + s.steps
    return tuple(sorted(Spend(q, steps, n) for (q, n), steps in parts.items())) + ((Spend(1.0, 1, whole),) if whole else ())


def epsilon(spends: Sequence[Spend], noise: float, delta: float, accountant: str = "prv") -> float:
    """Epsilon at ``delta``; infinite without noise, 0 where nothing was released."""
    return epsilons([spends], noise, [delta], accountant)[0]


def epsilons(clients: Sequence[Sequence[Spend]], noise: float, deltas: Sequence[float], accountant: str = "prv") -> list[float]:
    """Epsilon of every client. Beyond ``DISTINCT`` kinds of clients, q and steps are rounded up by at most 4 %."""
    kinds = [gathered(spends) for spends in clients]
    if len(set(kinds)) > DISTINCT:
        kinds = [gathered([Spend(_up(s.q), math.ceil(_up(s.steps)), s.releases) for s in kind]) for kind in kinds]
    epsilons: dict[tuple[Spends, float], float] = {}
    for kind in dict.fromkeys(kinds):
        wanted = {delta for k, delta in zip(kinds, deltas, strict=True) if k == kind}
        epsilons |= {(kind, delta): value for delta, value in _at(kind, noise, tuple(sorted(wanted)), accountant).items()}
    return [epsilons[kind, delta] for kind, delta in zip(kinds, deltas, strict=True)]


def noise_for(target: float, clients: Sequence[Sequence[Spend]], deltas: Sequence[float], accountant: str = "prv") -> float:
    """Return the least noise, to a third of a per cent, with which no client spends more than ``target``."""
    worst = _largest([(gathered(spends), delta) for spends, delta in zip(clients, deltas, strict=True)])

    def spent(noise: float, how: str) -> float:
        return max((v for kind, delta in worst for v in _at(kind, noise, (delta,), how).values()), default=0.0)

    if spent(MOST_NOISE, accountant) > target:
        least = spent(MOST_NOISE, accountant)
        raise InvalidArgument(
            f"target_epsilon={target:g} cannot be reached: with noise {MOST_NOISE:g} times the clip a client still spends "
            f"{least:.3g}; ask for more, or train with fewer rounds or more rows per client"
        )
    low, high = 1e-2, MOST_NOISE
    for how in ("quick", accountant):  # the quick bound narrows the bracket
        if how != "quick":
            low = max(1e-2, high / 4)
            while low > 1e-2 and spent(low, how) <= target:
                high, low = low, max(1e-2, low / 4)
        while high / low > (1.2 if how == "quick" else 1.003):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if spent(middle, how) <= target else (middle, high)
    digit = 10.0 ** (math.floor(math.log10(high)) - 3)
    return round(math.ceil(high / digit) * digit, 8)  # four digits


def delta_of(rows: int) -> float:
    """Return min(1e-5, 1/(10 rows)): well below one in the number of rows."""
    return min(1e-5, 0.1 / rows)


def _largest(clients: list[tuple[Spends, float]]) -> list[tuple[Spends, float]]:
    """Return those that no other client outspends: with one term each, by q, steps, releases and delta."""
    distinct = list(dict.fromkeys(clients))

    def beats(a: tuple[Spends, float], b: tuple[Spends, float]) -> bool:
        (x, d), (y, e) = a, b
        fits = len(x) == len(y) and all(
            p.q >= r.q and p.steps >= r.steps and p.releases >= r.releases for p, r in zip(x, y, strict=True)
        )
        return a != b and fits and d <= e

    return [one for one in distinct if not any(beats(other, one) for other in distinct)]


def _up(number: float) -> float:
    """Rounded up on a geometric grid; 1 stays 1."""
    return number if number == 1 else min(1.0, _power(number)) if number < 1 else _power(number)


def _power(number: float) -> float:
    return GRID ** math.ceil(round(math.log(number) / math.log(GRID), 9))


@lru_cache(maxsize=4096)  # seeds and methods of a comparison ask the same again
def _at(kind: Spends, noise: float, deltas: tuple[float, ...], accountant: str) -> dict[float, float]:
    if not kind:
        return dict.fromkeys(deltas, 0.0)
    if noise == 0:
        return dict.fromkeys(deltas, math.inf)
    quick = _renyi(kind, noise, deltas, [2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128, 256, 512])
    if accountant == "quick":
        return quick
    if accountant == "rdp":
        return _renyi(kind, noise, deltas, None)
    if min(quick.values()) > LARGE:
        return quick
    return _loss_distribution(kind, noise, deltas)


def _renyi(kind: Spends, noise: float, deltas: Sequence[float], orders: Sequence[float] | None) -> dict[float, float]:
    with _library() as dp:
        counter = dp.rdp.RdpAccountant() if orders is None else dp.rdp.RdpAccountant(orders)
        for s in kind:
            event = dp.GaussianDpEvent(noise / math.sqrt(s.releases))
            counter.compose(event if s.q >= 1 else dp.PoissonSampledDpEvent(s.q, event), s.steps)
        return {delta: float(counter.get_epsilon(delta)) for delta in deltas}


def _loss_distribution(kind: Spends, noise: float, deltas: Sequence[float]) -> dict[float, float]:
    with _library() as dp:
        fine = min(1e-2, math.sqrt(2e-3 / sum(s.steps for s in kind)))  # adds about 0.001 to epsilon
        total: Any = None
        for s in kind:
            one = dp.pld.privacy_loss_distribution.from_gaussian_mechanism(
                noise / math.sqrt(s.releases), sampling_prob=s.q, value_discretization_interval=fine
            ).self_compose(s.steps)
            total = one if total is None else total.compose(one)
        return {delta: float(total.get_epsilon_for_delta(delta)) for delta in deltas}


@contextmanager
def _library() -> Iterator[Any]:
    """Return dp-accounting, without its remarks about orders that do not converge (it leaves them out)."""
    try:
        import dp_accounting
        from dp_accounting import pld, rdp  # noqa: F401 (bound to dp_accounting)
    except ImportError:
        raise InvalidArgument("privacy needs an accountant; install it with: pip install 'fedtailor[privacy]'") from None
    remarks = logging.getLogger("absl")
    before = remarks.level
    remarks.setLevel(logging.ERROR)
    try:
        yield dp_accounting
    finally:
        remarks.setLevel(before)
