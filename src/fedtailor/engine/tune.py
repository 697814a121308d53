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
from fedtailor.errors import Diverged, InvalidArgument
from fedtailor.metrics.client import score_name

GRID: dict[str, tuple[float, ...]] = {"lr": (0.01, 0.03, 0.1, 0.3, 1.0), "lam": (0.01, 0.1, 1.0), "mu": (0.01, 0.1, 1.0)}
KEEP = 3  # one in so many goes on to three times the rounds


def grid_of(algorithm: Algorithm, grid: Mapping[str, Sequence[float]] | None = None) -> dict[str, list[float]]:
    """Values to try for each setting the method has as a plain number; its own value is always among them."""
    known = {f.name for f in dataclasses.fields(algorithm)}
    out = {}
    for name, values in (GRID if grid is None else grid).items():
        if name in known:
            own = getattr(algorithm, name)
            if isinstance(own, bool) or not isinstance(own, (int, float)):
                continue  # a schedule, or left to the theory
            out[name] = sorted({*map(float, values), float(own)})
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
    found = grid_of(algorithm, grid)
    size = int(np.prod([len(values) for values in found.values()])) if found else 0
    return sum(count * length for count, length in rungs(size, rounds)) if size > 1 else 0


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
    if federation.val is None:
        raise InvalidArgument("tuning needs validation rows; give val= (or val_share above 0), or leave tune out")
    judged = dataclasses.replace(federation, test=federation.val)  # what run measures as test is validation here
    space = grid_of(algorithm, grid)
    story: dict[str, Any] = {"grid": space, "trials": list((known or {}).get("trials", [])), "chosen": {}}
    played = {(_key(t["settings"]), t["rounds"]): t for t in story["trials"]}
    left: list[dict[str, Any]] = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    if not space or len(left) == 1:
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
