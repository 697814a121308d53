"""A small grid of step sizes and penalties per method, judged on validation rows by successive halving; test rows stay unseen."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.engine.run import run
from fedtailor.errors import Diverged, InvalidArgument, nearest
from fedtailor.metrics.client import score_name

GRID: dict[str, tuple[float, ...]] = {"lr": (0.01, 0.03, 0.1, 0.3, 1.0), "lam": (0.01, 0.1, 1.0), "mu": (0.01, 0.1, 1.0)}
KEEP = 3  # one in so many goes on to three times the rounds


def numbers(grid: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """The grid as plain numbers."""
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
    """The settings to try. Those the method does not take together are left out; a value given that it never takes is refused."""
    space = grid_of(algorithm, grid)
    found = []
    refusals: dict[tuple[str, float], InvalidArgument] = {}
    for values in itertools.product(*space.values()):
        choice: dict[str, Any] = dict(zip(space, values, strict=True))
        try:
            dataclasses.replace(algorithm, **choice)
            found.append(choice)
        except InvalidArgument as error:
            refusals.update(dict.fromkeys(choice.items(), error))
    for pair, refusal in refusals.items():
        if grid is not None and not any(pair in choice.items() for choice in found):
            raise refusal
    return found


def grid_of(algorithm: Algorithm, grid: Mapping[str, Sequence[float]] | None = None) -> dict[str, list[float]]:
    """Values to try for each setting the method has as a plain number; its own value is always among them."""
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
    """(how many are tried, for how many rounds): all for a few rounds, the best third for three times as many, and so on."""
    levels = max(1, int(np.ceil(np.log(max(candidates, 1)) / np.log(KEEP))))
    out = []
    for level in range(levels):
        out.append((candidates, max(1, round(rounds / KEEP ** (levels - 1 - level)))))
        candidates = max(1, -(-candidates // KEEP))
    return out


def effort(algorithm: Algorithm, rounds: int, grid: Mapping[str, Sequence[float]] | None = None) -> int:
    """Rounds that tuning will play."""
    size = len(candidates(algorithm, grid))
    played: dict[int, int] = {}
    for count, length in rungs(size, rounds):
        played.setdefault(length, count)  # with few rounds, rungs may be equally long: the second asks for nothing new
    return sum(count * length for length, count in played.items()) if size > 1 else 0


def tune(
    algorithm: Algorithm,
    federation: Federation,
    model: Any,
    rounds: int,
    grid: Mapping[str, Sequence[float]] | None = None,
    known: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
    **options: Any,
) -> tuple[Algorithm, dict[str, Any]]:
    """(the method with the settings that did best on validation, the whole story).

    ``known`` is the story of an earlier call that was stopped: its trials are not played again. ``keep`` is given the story
    after every trial.
    """
    check([algorithm], federation)
    assert federation.val is not None
    judged = dataclasses.replace(federation, test=federation.val)  # what run measures as test is validation here
    story: dict[str, Any] = {"grid": grid_of(algorithm, grid), "trials": list((known or {}).get("trials", [])), "chosen": {}}
    played = {(_key(t["settings"]), t["rounds"]): t for t in story["trials"]}
    left: list[dict[str, Any]] = list(candidates(algorithm, grid))
    if len(left) == 1:
        return algorithm, story
    for count, length in rungs(len(left), rounds):
        for choice in left[:count]:
            if (_key(choice), length) not in played:
                trial = _try(dataclasses.replace(algorithm, **choice), judged, model, length, options)
                played[_key(choice), length] = {"settings": choice, "rounds": length, **trial}
                story["trials"].append(played[_key(choice), length])
                keep(story)
        left = sorted(left[:count], key=lambda c: _rank(played[_key(c), length]))
    story["chosen"] = left[0]
    if played[_key(left[0]), length]["score"] is None:
        raise InvalidArgument(f"{type(algorithm).__name__} diverges with every setting of the grid; give smaller step sizes")
    keep(story)
    return dataclasses.replace(algorithm, **left[0]), story


def _try(algorithm: Algorithm, federation: Federation, model: Any, rounds: int, options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = run(algorithm, federation, model, rounds=rounds, **{**options, "evaluate_every": 0}).summary
    except Diverged:
        return {"score": None, "loss": None}
    return {"score": found[f"{score_name(found['kind'])}_personal"], "loss": found["loss_personal"], "kind": found["kind"]}


def _rank(trial: Mapping[str, Any]) -> tuple[float, float]:
    """Lower is better: by accuracy (or mean squared error), then by loss."""
    if trial["score"] is None:
        return np.inf, np.inf
    return (trial["score"] if trial["kind"] == "regression" else -trial["score"]), trial["loss"]


def _key(choice: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(choice.items()))
