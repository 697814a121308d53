"""What an experiment of a paper is made of: settings, a measurement, a figure, and claims on the measured numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import stdtrit

Row = Mapping[str, Any]
Rows = Sequence[Row]
Settings = Mapping[str, Any]
Scale = Literal["laptop", "paper"]


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper and the number that decides it.

    ``number`` is computed from the rows of one seed; the claim holds where it is greater than ``above`` and less than ``below``
    in every seed. ``theirs`` is what the paper says of it, ``must`` whether the ledger fails when it does not hold.
    """

    words: str
    number: Callable[[Rows], float]
    above: float | None = None
    below: float | None = None
    theirs: str | None = None
    must: bool = True

    def holds(self, numbers: Sequence[float]) -> bool | None:
        """Say whether the claim holds, given its number in every seed; None where nothing was measured."""
        if not numbers:
            return None
        low, high = -np.inf if self.above is None else self.above, np.inf if self.below is None else self.below
        return all(low < number < high for number in numbers)  # a number that is not finite decides nothing


@dataclass(frozen=True)
class Figure:
    """The paper's axes: columns of the rows, and what is written beside them; a line per value of ``series``, and a
    dashed one of the column ``bound``."""

    x: str
    y: str
    series: str
    x_title: str
    y_title: str
    log_x: bool = False
    log_y: bool = False
    panel: str | None = None
    bound: str | None = None


@dataclass(frozen=True)
class Pieces:
    """A measurement that takes long, in pieces: each is kept as soon as it is done, so that a seed may be stopped.

    ``names(settings)`` are the pieces, ``rows(settings, seed, name)`` the rows of one.
    """

    names: Callable[[Settings], Sequence[str]]
    rows: Callable[[Settings, int, str], list[dict[str, Any]]]

    def __call__(self, settings: Settings, seed: int) -> list[dict[str, Any]]:
        return [row for name in self.names(settings) for row in self.rows(settings, seed, name)]


def by_value(key: str, measure: Callable[[Settings, int], list[dict[str, Any]]]) -> Pieces:
    """Return a measurement that walks through ``settings[key]`` as pieces, one for each of its values."""

    def rows(settings: Settings, seed: int, name: str) -> list[dict[str, Any]]:
        return measure({**settings, key: [value for value in settings[key] if str(value) == name]}, seed)

    return Pieces(lambda settings: [str(value) for value in settings[key]], rows)


@dataclass(frozen=True)
class Experiment:
    """One experiment: ``measure(settings, seed)`` returns rows of plain values, from which the figure and the claims are made.

    What the package keeps of an earlier measurement (``stored/``) may be the ``means_of`` several seeds; then it is all that
    counts at its scale.
    """

    title: str
    source: str  # where it stands in the paper
    settings: Mapping[Scale, Settings]
    measure: Callable[[Settings, int], list[dict[str, Any]]]
    figure: Figure
    claims: tuple[Claim, ...]
    convex: bool = True
    means_of: int | None = None


def interval(numbers: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean over seeds, by Student's law; None with one seed."""
    if len(numbers) < 2 or not np.isfinite(numbers).all():
        return None
    half = float(np.std(numbers, ddof=1) / np.sqrt(len(numbers)) * stdtrit(len(numbers) - 1, 0.975))
    return float(np.mean(numbers)) - half, float(np.mean(numbers)) + half


# -- reading rows, for the claims ----------------------------------------------------------------------------------------
def column(rows: Rows, key: str, /, **where: Any) -> np.ndarray:
    """Return a column of the rows that have these values, in their order."""
    return np.array([row[key] for row in rows if all(row[name] == value for name, value in where.items())], float)


def one(rows: Rows, key: str, /, **where: Any) -> float:
    """Return the only entry of a column among the rows that have these values."""
    values = column(rows, key, **where)
    if len(values) != 1:
        raise LookupError(f"{len(values)} rows have {dict(where)}, not one")
    return float(values[0])


def slope(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Return the power with which y grows with x: the slope of a line fitted to their logarithms."""
    return float(np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0])
