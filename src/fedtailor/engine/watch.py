"""Callbacks: told of every round, they may end the run, and say which round's state it is to end with.

A run that goes on tells them again of the rounds that were played before, so that what they remember of records is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedtailor.algorithms import origin
from fedtailor.engine.base import Engine
from fedtailor.engine.options import Options
from fedtailor.engine.state import State
from fedtailor.errors import FedtailorError, InvalidArgument
from fedtailor.task.scores import Metric


@dataclass(frozen=True, eq=False)
class Moment:
    """A round that has just ended, as a callback sees it.

    ``history`` has the records of all rounds so far (``record`` is that of this one), ``rounds`` how many there are to be.
    ``past`` says that the round was played in an earlier sitting: its record is known and its models are not.
    """

    history: Sequence[Mapping[str, Any]]
    rounds: int
    past: bool = False
    _engine: Engine | None = None
    _state: State | None = None

    @property
    def record(self) -> Mapping[str, Any]:
        return self.history[-1]

    @property
    def shared(self) -> Any:
        """The shared tree after the round."""
        engine, state = self._now()
        return engine.out(state.shared)

    @property
    def server(self) -> Any:
        """The server's own tree after the round."""
        engine, state = self._now()
        return engine.out(state.server)

    def personal(self, client: int | str) -> Any:
        """Return the tree with which a client predicts now."""
        engine, state = self._now()
        return engine.personal(state.sent, engine.plan.federation.index(client), state.store)

    def keep(self) -> None:
        """Let the run end with the state after this round, whenever it ends, unless a later round is kept."""
        if self._state is not None:
            self._state.keep()

    def _now(self) -> tuple[Engine, State]:
        if self._engine is None or self._state is None:
            raise InvalidArgument("the models of a round that was played in an earlier sitting are not known; look at past first")
        return self._engine, self._state


Callback = Callable[[Moment], Any]


@dataclass
class Patience:
    """Keeps the round that is best on validation, and ends the run once it is ``rounds`` rounds old."""

    rounds: int
    score: Metric
    best: tuple[float, int] | None = field(default=None, init=False)

    def __call__(self, now: Moment) -> str | None:
        key = f"val_{self.score.name}_personal"
        value, number = now.record.get(key), now.record["round"]
        if value is not None and (self.best is None or self.score.merit(value) > self.best[0]):
            self.best = self.score.merit(value), number
            now.keep()
        if self.best is None or number - self.best[1] < self.rounds:
            return None
        return f"{key} has not improved for {number - self.best[1]} rounds"


class Watch:
    """The callbacks of a run, each made anew where a class was given."""

    def __init__(self, options: Options, score: Metric) -> None:
        self.rounds = options.rounds
        self.callbacks: list[tuple[str, Callback]] = []
        if options.patience is not None:
            self.callbacks.append(("patience", Patience(options.patience, score)))
        for spec in options.callbacks:
            callback = origin.function_of(spec)
            self.callbacks.append((origin.name_of(spec), callback() if isinstance(callback, type) else callback))

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    def recall(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Tell of the rounds that were played in earlier sittings."""
        for count in range(1, len(records) + 1):
            self._ask(Moment(records[:count], self.rounds, past=True))

    def tell(self, engine: Engine, state: State) -> str | None:
        """Tell of the round that has just ended; return why the run is to end here, or None."""
        return self._ask(Moment(tuple(state.records), self.rounds, False, engine, state))

    def _ask(self, now: Moment) -> str | None:
        reasons = []
        for name, callback in self.callbacks:
            answer = _answer(name, callback, now)
            if answer:
                reasons.append(answer if isinstance(answer, str) else f"{name} asked for it")
        return reasons[0] if reasons else None


def _answer(name: str, callback: Callback, now: Moment) -> Any:
    try:
        answer = callback(now)
    except (FedtailorError, KeyboardInterrupt):
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidArgument(
            f"the callback {name} fails after round {now.record['round']} ({type(error).__name__}: {text})"
        ) from error
    if answer is None or isinstance(answer, (bool, str)):
        return answer
    raise InvalidArgument(f"the callback {name} gives {answer!r}; let it return True or a reason to end the run, or nothing")
