"""A small grid of step sizes and penalties per method, judged on validation rows by successive halving; test rows stay unseen."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.engine.base import one_thread
from fedtailor.engine.divergence import check_loss
from fedtailor.engine.measure import validate
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import Prepared, prepare
from fedtailor.engine.run import Callback, run
from fedtailor.engine.several import Player, play_together
from fedtailor.engine.spread import Spread
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import Diverged, InvalidArgument, nearest
from fedtailor.task.kinds import kind_of
from fedtailor.task.scores import score_named

GRID: dict[str, tuple[float, ...]] = {"lr": (0.01, 0.03, 0.1, 0.3, 1.0), "lam": (0.01, 0.1, 1.0), "mu": (0.01, 0.1, 1.0)}
DIVERGED: dict[str, Any] = {"score": None, "loss": None}
KEEP = 3  # one in so many goes on to three times the rounds


def numbers(grid: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the grid as plain numbers."""
    try:
        return {str(name): [float(value) for value in values] for name, values in grid.items()}
    except (TypeError, ValueError):
        raise InvalidArgument(f"the grid must be lists of numbers, as {{'lr': [0.1, 0.3]}}, not {dict(grid)!r}") from None


def check(algorithms: Sequence[Algorithm], federation: Federation, grid: Mapping[str, Sequence[float]] | None = None) -> None:
    """Refuse what cannot be tuned: no validation rows, a setting that no method has, a value that no method takes."""
    if federation.val is None:
        raise InvalidArgument("tuning needs validation rows; give val= (or val_share above 0), or leave tune out")
    known = sorted({f.name for algorithm in algorithms for f in dataclasses.fields(algorithm)})
    numeric = {name for algorithm in algorithms for name in grid_of(algorithm, grid)}
    for name in grid or {}:
        if name not in known:
            raise InvalidArgument(f"none of the methods has the grid's {name!r}; {nearest(name, known, 'their settings are')}")
        if name not in numeric:
            raise InvalidArgument(
                f"none of the methods has a number for the grid's {name!r}; set one to begin with, or leave it out"
            )
    for algorithm in algorithms:
        candidates(algorithm, grid)


def candidates(algorithm: Algorithm, grid: Mapping[str, Sequence[float]] | None = None) -> list[dict[str, Any]]:
    """Return the settings to try: those that the method takes together. A value of ``grid`` that it never takes is refused."""
    space = grid_of(algorithm, grid)
    choices = []
    refusals: dict[tuple[str, float], InvalidArgument] = {}
    for values in itertools.product(*space.values()):
        choice: dict[str, Any] = dict(zip(space, values, strict=True))
        try:
            dataclasses.replace(algorithm, **choice)
            choices.append(choice)
        except InvalidArgument as error:
            refusals.update(dict.fromkeys(choice.items(), error))
    for pair, refusal in refusals.items():
        if grid is not None and not any(pair in choice.items() for choice in choices):
            raise refusal
    return choices


def grid_of(algorithm: Algorithm, grid: Mapping[str, Sequence[float]] | None = None) -> dict[str, list[float]]:
    """Return the values to try for each setting the method has as a plain number; its own value is always among them."""
    known = {f.name for f in dataclasses.fields(algorithm)}
    out = {}
    for name, values in (GRID if grid is None else grid).items():
        if name in known:
            own = getattr(algorithm, name)
            if isinstance(own, bool) or not isinstance(own, (int, float)):
                continue  # a schedule, or left to the theory
            tried = sorted({*map(float, values), float(own)})
            whole = isinstance(own, int) and all(value.is_integer() for value in tried)
            out[name] = [int(value) if whole else value for value in tried]  # steps and epochs are counted
    return out


def rungs(candidates: int, rounds: int) -> list[tuple[int, int]]:
    """Return (how many are tried, for how many rounds): all for a few, the best third for three times as many, and so on."""
    levels = max(1, int(np.ceil(np.log(max(candidates, 1)) / np.log(KEEP))))
    out = []
    for level in range(levels):
        out.append((candidates, max(1, round(rounds / KEEP ** (levels - 1 - level)))))
        candidates = max(1, -(-candidates // KEEP))
    return out


def effort(algorithm: Algorithm, rounds: int, grid: Mapping[str, Sequence[float]] | None = None) -> int:
    """Return the number of rounds that tuning will play."""
    size = len(candidates(algorithm, grid))
    played: dict[int, int] = {}
    for count, length in rungs(size, rounds):
        played.setdefault(length, count)  # with few rounds, rungs may be equally long: the second asks for nothing new
    return sum(count * length for length, count in played.items()) if size > 1 else 0


@dataclass(frozen=True, eq=False)
class Trials:
    """Everything that settings are tried on: the data, the model, the options of the run, and what is tried (None: the usual
    grid)."""

    federation: Federation
    model: Any
    options: Options
    grid: Mapping[str, Sequence[float]] | None = None
    callback: Callback | None = None
    spread: Spread | None = None

    def scores(self, algorithms: Sequence[Algorithm], rounds: int) -> Iterator[dict[str, Any]]:
        """Yield score and loss on validation rows of each setting after so many rounds; None where it diverges.

        Settings that differ in numbers only are played all at once (``engine/several.py``), others one by one, or each by a node
        of a cluster.
        """
        if self.spread is not None:
            yield from self.spread.trials(_tried_afar, algorithms, self.federation, self._options(rounds), self.callback)
            return
        together = self._together(algorithms, rounds)
        yield from together if together is not None else (self._score(algorithm, rounds) for algorithm in algorithms)

    def _options(self, rounds: int) -> Options:
        return self.options.but(rounds=rounds, evaluate_every=0, patience=None, callbacks=())

    @one_thread()
    def _together(self, algorithms: Sequence[Algorithm], rounds: int) -> list[dict[str, Any]] | None:
        if len(algorithms) < 2 or self.options.engine not in ("auto", VectorizedEngine.name):
            return None
        options = self._options(rounds)
        prepared = [prepare(algorithm, self.federation, self.model, options) for algorithm in algorithms]
        players = play_together(prepared, *(() if self.callback is None else (self.callback,)))
        return None if players is None else [_judged(player, prepared[0]) for player in players]

    def _score(self, algorithm: Algorithm, rounds: int) -> dict[str, Any]:
        return _tried(algorithm, self.federation, self.model, self._options(rounds), self.callback)


def _tried(
    algorithm: Algorithm, federation: Federation, model: Any, options: Options, callback: Callback | None
) -> dict[str, Any]:
    """Return score and loss of a setting on validation rows, from a run of its own."""
    assert federation.val is not None
    judged = dataclasses.replace(federation, test=federation.val)  # what run measures as test is validation here
    try:
        done = run(algorithm, judged, model, options, callback=callback)
    except Diverged:
        return DIVERGED
    return {"score": done.summary["val_score"], "loss": done.summary["loss_personal"], "by": done.task.score.name}


def _tried_afar(
    algorithm: Algorithm, federation: Federation, model: Any, options: Options
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return score and loss of a setting, and the records of its rounds."""
    records: list[dict[str, Any]] = []
    return _tried(algorithm, federation, model, options, records.append), records


def _judged(player: Player, ready: Prepared) -> dict[str, Any]:
    """Return score and loss of a setting on validation rows."""
    if player.failure is not None:
        return DIVERGED
    state, rounds = player.state, ready.options.rounds
    measured, columns = validate(player.engine, state.sent, state.store)
    try:
        last = player.engine.plan.round(rounds - 1, rounds, np.arange(len(columns["rows"])))
        check_loss(player.engine, state.sent, state.store, columns["loss_personal"], last)
    except Diverged:
        return DIVERGED
    return {"score": measured["val_score"], "loss": measured["val_loss_personal"], "by": ready.task.score.name}


def tune(
    algorithm: Algorithm,
    trials: Trials,
    known: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[Algorithm, dict[str, Any]]:
    """Return (the method with the settings that did best on validation, the whole story).

    ``known`` is the story of an earlier call that was stopped: its trials are not played again. ``keep`` is given the story
    after every trial.
    """
    check([algorithm], trials.federation)
    grid, rounds = trials.grid, trials.options.rounds
    story: dict[str, Any] = {"grid": grid_of(algorithm, grid), "trials": list((known or {}).get("trials", [])), "chosen": {}}
    played = {(_key(t["settings"]), t["rounds"]): t for t in story["trials"]}
    left: list[dict[str, Any]] = list(candidates(algorithm, grid))
    if len(left) == 1:
        return algorithm, story
    for count, length in rungs(len(left), rounds):
        untried = [choice for choice in left[:count] if (_key(choice), length) not in played]
        settings = [dataclasses.replace(algorithm, **choice) for choice in untried]
        for choice, trial in zip(untried, trials.scores(settings, length), strict=True):
            played[_key(choice), length] = {"settings": choice, "rounds": length, **trial}
            story["trials"].append(played[_key(choice), length])
            if keep is not None:
                keep(story)
        left = sorted(left[:count], key=lambda c: _rank(played[_key(c), length]))
    story["chosen"] = left[0]
    if played[_key(left[0]), length]["score"] is None:
        raise InvalidArgument(f"{type(algorithm).__name__} diverges with every setting of the grid; give smaller step sizes")
    if keep is not None:
        keep(story)
    return dataclasses.replace(algorithm, **left[0]), story


def _rank(trial: Mapping[str, Any]) -> tuple[float, float]:
    """Lower is better: by the score, then by loss."""
    if trial["score"] is None:
        return np.inf, np.inf
    score = score_named(trial["by"]) if "by" in trial else kind_of(trial["kind"]).score  # an earlier version wrote the kind
    return -score.merit(trial["score"]), trial["loss"]


def _key(choice: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(choice.items()))
