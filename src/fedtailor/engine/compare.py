"""``compare``: several methods on the same splits, seeds and start."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import settings, slug
from fedtailor.data.federation import Federation
from fedtailor.engine import tune as tuning
from fedtailor.engine.prefix import after_prefix
from fedtailor.engine.run import run
from fedtailor.engine.setup import DTYPES, build_task, check, make_plan, privatized
from fedtailor.errors import InvalidArgument
from fedtailor.metrics.cost import probe
from fedtailor.runs import config
from fedtailor.runs.folder import Folder
from fedtailor.runs.history import Run
from fedtailor.runs.record import Record
from fedtailor.server.cohort import cohort_size
from fedtailor.theory.rates import resolve


@dataclass(frozen=True, eq=False)
class Comparison(Mapping[str, Run]):
    """Runs by label: the method's name, numbered where a method occurs twice.

    As a mapping it gives the first seed's run; ``all`` has one per seed, ``tuning`` how each method's settings were chosen.
    """

    all: Mapping[str, Sequence[Run]]
    tuning: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __getitem__(self, label: str) -> Run:
        return self.all[label][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def table(self, *columns: str) -> list[dict[str, Any]]:
        """A row per method: its label and the summary (or the columns named), numbers averaged over the seeds."""
        known = {key for r in self.values() for key in r.summary}
        for column in columns:
            if column not in known:
                raise InvalidArgument(f"no column {column!r} in the summaries; the columns are {', '.join(sorted(known))}")
        return [
            {
                "method": label,
                **{k: _average([r.summary.get(k) for r in runs]) for k in runs[0].summary if not columns or k in columns},
            }
            for label, runs in self.all.items()
        ]

    def records(self) -> dict[str, list[Record]]:
        """What a report is made of."""
        return {
            label: [replace(r.record(label), tuning=self.tuning.get(label)) for r in runs] for label, runs in self.all.items()
        }


def compare(
    algorithms: Sequence[Algorithm] | Mapping[str, Algorithm],
    federation: Federation,
    model: Any = "linear",
    *,
    rounds: int = 100,
    seed: int = 0,
    seeds: int = 1,
    tune: bool | Mapping[str, Sequence[float]] = False,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    callback: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> Comparison:
    """Run every algorithm with the same options (those of ``run``); a mapping gives the labels.

    ``seeds`` repeats each with that many seeds, from ``seed`` on. ``tune`` first tries a small grid of step sizes and penalties
    per method (or the grid given, as ``{"lr": [0.1, 0.3]}``) and keeps what does best on the clients' validation rows. ``out``
    is a directory with a run directory per method and seed; ``resume`` goes on where it was stopped. ``callback`` is given
    every round's record, with the method's ``label`` and the ``stage`` (tune or train).
    """
    if isinstance(algorithms, Algorithm):
        algorithms = [algorithms]
    if not algorithms:
        raise InvalidArgument("there is nothing to compare; give at least one algorithm")
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise InvalidArgument(f"seeds must be a whole number of at least 1, not {seeds!r}")
    named = dict(algorithms) if isinstance(algorithms, Mapping) else _labelled(algorithms)
    if not all(isinstance(label, str) for label in named):
        raise InvalidArgument(f"labels must be text, not {next(label for label in named if not isinstance(label, str))!r}")
    if len({place(label) for label in named}) < len(named):
        raise InvalidArgument(f"two labels read alike among {', '.join(named)}; give the methods labels that differ in letters")
    grid = tuning.numbers(tune) if isinstance(tune, Mapping) else None
    asked = arguments(federation, model, rounds=rounds, seed=seed, **options)
    kept = rehearse(list(named.values()), federation, model, asked)
    if tune:
        tuning.check(list(named.values()), federation, grid)
    with ExitStack() as held:
        folder = None
        if out is not None:
            folder = Folder(Path(out), _config(named, federation, model, {**asked, "seeds": seeds}, tune), resume)
            held.callback(folder.close)
        runs: dict[str, list[Run]] = {}
        stories: dict[str, Mapping[str, Any]] = {}
        for label, given in named.items():
            chosen = given
            if tune:
                chosen, stories[label] = _tuned(
                    label, given, federation, model, rounds, grid, folder, callback, {"seed": seed, **options}
                )
            runs[label] = [
                run(
                    chosen,
                    federation,
                    model,
                    rounds=rounds,
                    seed=number,
                    out=None if folder is None else folder.of(place(label), number),
                    resume=folder is not None,
                    callback=_telling(callback, label, "train", number),
                    **options,
                )
                for number in range(seed, seed + seeds)
            ]
        del kept
        found = Comparison(runs, stories)
        if folder is not None:
            folder.finish({label: place(label) for label in named}, seed, seeds, found.table())
    return found


def arguments(federation: Federation, model: Any, **options: Any) -> dict[str, Any]:
    """The options of ``run``, with its defaults where they are not given."""
    bound = inspect.signature(run).bind(None, federation, model, **options)
    bound.apply_defaults()
    own = ("algorithm", "federation", "model", "out", "resume", "callback")
    return {name: value for name, value in bound.arguments.items() if name not in own}


def rehearse(algorithms: Sequence[Algorithm], federation: Federation, model: Any, given: Mapping[str, Any]) -> Federation:
    """Let a client take a step with each method, so that one that cannot be trained is refused before anything is written.

    Gives the rows as the frozen first layers leave them: while they are held, runs need not compute them anew.
    """
    judged = [given[name] for name in inspect.signature(check).parameters if name not in ("algorithm", "federation")]
    for algorithm in algorithms:
        check(algorithm, federation, *judged)
    rows = federation.to(DTYPES[given["dtype"]]).as_task(given["task"] or federation.kind)
    task = build_task(model, rows, given["seed"], DTYPES[given["dtype"]], given["bias"], given["backbone"])
    whole, (short, kept, _) = (task, rows), after_prefix(task, rows)
    for algorithm in algorithms:
        task, rows = whole if algorithm.reads_rows else (short, kept)
        size = cohort_size(given["cohort"], len(rows))
        if algorithm.needs_everyone and size < len(rows):
            raise InvalidArgument(f"{type(algorithm).__name__} needs all clients in every round; use cohort=1.0")
        ready, _ = resolve(algorithm, task, rows, given["rounds"], size, given["batch_size"], given["weights"])
        ready = privatized(ready, task, rows, given["rounds"], size, given["batch_size"], given["seed"])
        probe(ready, task, make_plan(ready, task, rows, given["batch_size"], given["seed"], given["weights"]).feed)
    return kept


def total(algorithms: Mapping[str, Algorithm], rounds: int, seeds: int, tune: bool | Mapping[str, Sequence[float]]) -> int:
    """Rounds that a comparison will play, tuning included."""
    grid = tune if isinstance(tune, Mapping) else None
    return sum(rounds * seeds + (tuning.effort(a, rounds, grid) if tune else 0) for a in algorithms.values())


def _tuned(
    label: str,
    algorithm: Algorithm,
    federation: Federation,
    model: Any,
    rounds: int,
    grid: Mapping[str, Sequence[float]] | None,
    folder: Folder | None,
    callback: Callable[[dict[str, Any]], None] | None,
    options: Mapping[str, Any],
) -> tuple[Algorithm, dict[str, Any]]:
    known = None if folder is None else folder.story(place(label))
    keep = (lambda story: None) if folder is None else (lambda story: folder.keep(place(label), story))
    told = _telling(callback, label, "tune", options["seed"])
    return tuning.tune(algorithm, federation, model, rounds, grid, known, keep, callback=told, **options)


def _telling(callback: Any, label: str, stage: str, seed: int) -> Any:
    if callback is None:
        return None
    return lambda record: callback({**record, "label": label, "stage": stage, "seed": seed})


def _config(
    named: Mapping[str, Algorithm], federation: Federation, model: Any, asked: Mapping[str, Any], tune: Any
) -> dict[str, Any]:
    out = config.describe(next(iter(named.values())), federation, model, asked)
    del out["method"]
    grid = tuning.numbers(tune) if isinstance(tune, Mapping) else None
    asked = {"command": "compare", "methods": list(named), "tune": bool(tune)} | ({"grid": grid} if grid else {})
    return {**out, **asked, "set": {label: {"method": slug(a), **settings(a)} for label, a in named.items()}}


def place(label: str) -> str:
    """A label as a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.") or "method"


def _average(values: Sequence[Any]) -> Any:
    if len(values) > 1 and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        return float(np.mean(values))
    return values[0]


def _labelled(algorithms: Sequence[Algorithm]) -> dict[str, Algorithm]:
    out: dict[str, Algorithm] = {}
    for algorithm in algorithms:
        name = type(algorithm).__name__
        taken = sum(label.split(" ")[0] == name for label in out)
        out[name if not taken else f"{name} {taken + 1}"] = algorithm
    return out
