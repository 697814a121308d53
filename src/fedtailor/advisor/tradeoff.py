"""Accuracy against communication, as plain values: the Pareto front, the fewest rounds for a target, sensible targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEVELS = (0.25, 0.5, 0.75, 0.9, 1.0)  # shares of the way from the worst score to the best: the targets unless given


@dataclass(frozen=True)
class Point:
    """The point where a curve is after a round: bytes sent so far by all clients, and the measures on validation rows."""

    round: int
    bytes: int
    val_score: float
    val_loss: float
    error: float | None = None


class Place(NamedTuple):
    """A point of the curve of one lam."""

    lam: float
    round: int
    bytes: int
    val_score: float


class Fewest(NamedTuple):
    """The lam that first reaches a target and keeps it to the end; None where none does."""

    target: float
    lam: float | None
    rounds: int | None
    bytes: int | None


Curves = Mapping[float, Sequence[Point]]


def front(curves: Curves, higher: bool) -> list[Place]:
    """Return the points that no other beats: none has as few bytes and rounds and as good a score, and one of them better.

    Of points equal in all, that of the smallest lam is given. By rising rounds, so the scores improve from one to the next.
    """
    sign = 1 if higher else -1
    everything = [Place(lam, p.round, p.bytes, p.val_score) for lam, points in curves.items() for p in points]
    best: list[Place] = []
    for place in sorted(everything, key=lambda p: (p.bytes, p.round, -sign * p.val_score, p.lam)):
        if not any(b.round <= place.round and sign * b.val_score >= sign * place.val_score for b in best):
            best.append(place)
    return best


def fewest(curves: Curves, targets: Iterable[float], higher: bool) -> list[Fewest]:
    """Return, for every target, the lam that reaches it in the fewest rounds and keeps it to the end; where two do, that with
    fewer bytes, then the smaller. A score that a run passes on its way and does not keep is not reached."""
    sign = 1 if higher else -1
    out = []
    for target in targets:
        firsts = {lam: _kept_from(points, sign, float(target)) for lam, points in curves.items()}
        reached = [(first.round, first.bytes, lam) for lam, first in firsts.items() if first is not None]
        rounds, size, lam = min(reached) if reached else (None, None, None)
        out.append(Fewest(float(target), lam, rounds, size))
    return out


def _kept_from(points: Sequence[Point], sign: int, target: float) -> Point | None:
    """Return the first point from which on all are as good as the target; None where the last is not."""
    last_bad = max((i for i, point in enumerate(points) if sign * point.val_score < sign * target), default=-1)
    return points[last_bad + 1] if last_bad + 1 < len(points) else None


def levels(scores: Sequence[float], higher: bool) -> list[float]:
    """Targets between the worst and the best of ``scores``, from the easiest to the best itself."""
    worst, best = (min(scores), max(scores)) if higher else (max(scores), min(scores))
    return list(dict.fromkeys(best if level == 1 else worst + level * (best - worst) for level in LEVELS))


def round_budget(rounds: int, lams: int) -> int:
    """Rounds that a sweep may spend: one run for the first lam and less than a third of one for each further."""
    return -(-rounds * (lams + 2) // 3) - 1


def settled(points: Sequence[Point]) -> Point:
    """Return the first point from which on the loss stays near its end: within a twentieth of its change from first to last."""
    last = points[-1].val_loss
    tolerance = 0.05 * abs(points[0].val_loss - last)
    outside = [i for i, p in enumerate(points) if abs(p.val_loss - last) > tolerance]
    return points[min(outside[-1] + 1 if outside else 0, len(points) - 1)]
