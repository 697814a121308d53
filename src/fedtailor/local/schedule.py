"""Step sizes that change with the round or with the local step."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

from fedtailor.errors import InvalidArgument

Rate = float | Tensor | Callable[[int], float]  # a tensor where clients have step sizes of their own


class Schedule(ABC):
    """``at(round)`` is the step size of a round: a number, or a function of the local step."""

    @abstractmethod
    def at(self, round: int) -> Rate: ...

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            fine = not isinstance(value, (int, float)) or value > 0 or (name == "end" and value == 0)
            if not fine:
                raise InvalidArgument(f"{type(self).__name__}: {name} must be greater than 0, not {value}")


def at(lr: float | Schedule, round: int) -> Rate:
    return lr.at(round) if isinstance(lr, Schedule) else lr


@dataclass(frozen=True)
class Exponential(Schedule):
    """The step size start * factor^round."""

    start: float
    factor: float = 0.99

    def at(self, round: int) -> Rate:
        return self.start * self.factor**round


@dataclass(frozen=True)
class Cosine(Schedule):
    """From ``start`` to ``end`` along half a cosine over ``rounds``, then ``end``."""

    start: float
    rounds: int
    end: float = 0.0

    def at(self, round: int) -> Rate:
        t = min(round, self.rounds) / self.rounds
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * t)) / 2


@dataclass(frozen=True)
class Milestones(Schedule):
    """``start``, multiplied by ``factor`` at each round listed in ``rounds``."""

    start: float
    rounds: tuple[int, ...]
    factor: float = 0.1

    def at(self, round: int) -> Rate:
        return self.start * self.factor ** sum(round >= milestone for milestone in self.rounds)


@dataclass(frozen=True)
class Harmonic(Schedule):
    """The step size scale / (k + 1), k counting rounds, or local steps with ``per="step"`` (MINIMAX, analysis of Algorithm 2)."""

    scale: float
    per: str = "round"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per not in ("round", "step"):
            raise InvalidArgument(f"Harmonic: per must be 'round' or 'step', not {self.per!r}")

    def at(self, round: int) -> Rate:
        if self.per == "step":
            return lambda step: self.scale / (step + 1)
        return self.scale / (round + 1)


@dataclass(frozen=True, repr=False)
class Lambda(Schedule):
    """A function of the user's own, of the round or of (round, local step), both counted from 0."""

    function: Callable[..., float]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidArgument(f"Lambda: give a function of the round, or of (round, step), not {self.function!r}")
        self.at(0)

    def __repr__(self) -> str:
        return f"Lambda({getattr(self.function, '__name__', type(self.function).__name__)})"

    @property
    def per_step(self) -> bool:
        """Return whether the function takes the local step as well."""
        parameters = inspect.signature(self.function).parameters.values()
        return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) > 1

    def at(self, round: int) -> Rate:
        if not self.per_step:
            return self._checked(round)
        self._checked(round, 0)
        return lambda step: self._checked(round, step)

    def _checked(self, *place: int) -> float:
        where = f"round {place[0]}" + (f", step {place[1]}" if len(place) > 1 else "")
        try:
            value: Any = self.function(*place)
        except Exception as error:  # whatever a function of the user's may raise
            text = f"{type(error).__name__}: {error}"
            raise InvalidArgument(f"{self!r} fails in {where} ({text}); let it take the round, or (round, step)") from error
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
            raise InvalidArgument(f"{self!r} gives {value!r} in {where}; let it return a number greater than 0")
        return float(value)
