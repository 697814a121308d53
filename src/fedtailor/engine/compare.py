"""``compare``: several methods on the same splits, seeds and start."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import settings, spec
from fedtailor.data.federation import Federation
from fedtailor.engine import tune as tuning
from fedtailor.engine.ledger import Ledger
from fedtailor.engine.options import Options, taking
from fedtailor.engine.prepare import prepare
from fedtailor.engine.run import Callback, run
from fedtailor.engine.setup import named_model
from fedtailor.errors import Diverged, FedtailorError, InvalidArgument, InvalidData, NothingMeasured
from fedtailor.runs import config
from fedtailor.runs.failure import Failure, blameless
from fedtailor.runs.folder import Folder
from fedtailor.runs.history import Run
from fedtailor.runs.patience import stop_if_noted
from fedtailor.runs.record import Record

TRIALS_COUNT = "the trials of tuning look at the clients' rows too: they are counted in epsilon of all runs together"


@dataclass(frozen=True, eq=False)
class Comparison(Mapping[str, Run]):
    """Runs by label: the method's name, numbered where a method occurs twice.

    As a mapping it gives the first seed's run; ``all`` has one per seed, ``tuning`` how each method's settings were chosen and
    ``tuning_seconds`` how long that took. ``failed`` says of the methods that could not be measured why. ``privacy`` is what all
    runs and trials together have spent, where they are private.
    """

    all: Mapping[str, Sequence[Run]]
    tuning: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    tuning_seconds: Mapping[str, float] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, label: str) -> Run:
        return self.all[label][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def summaries(self, label: str) -> list[dict[str, Any]]:
        """Return a method's summary per seed, with the time that its tuning took, and what all runs together have spent."""
        spent = {"tuning_seconds": self.tuning_seconds[label]} if label in self.tuning_seconds else {}
        return [{**r.summary, **spent, **self._composed(r.summary)} for r in self.all[label]]

    def _composed(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """What all runs together have spent, of the kinds of privacy that a run has."""
        of_rows, of_clients = "noise" in summary, "user_noise" in summary
        return {key: value for key, value in self.privacy.items() if (of_clients if key.startswith("user_") else of_rows)}

    def table(self, *columns: str) -> list[dict[str, Any]]:
        """Return a row per method: its label and the summary (or the columns named), numbers averaged over the seeds.

        The rows of methods that failed come last and have ``failed``, the reason, in place of measures.
        """
        known = {key for label in self for summary in self.summaries(label) for key in summary}
        for column in columns:
            if column not in known:
                raise InvalidArgument(f"no column {column!r} in the summaries; the columns are {', '.join(sorted(known))}")
        rows: list[dict[str, Any]] = []
        for label in self:
            summaries = self.summaries(label)
            shown = [key for key in summaries[0] if not columns or key in columns]
            rows.append({"method": label, **{key: _average([s.get(key) for s in summaries]) for key in shown}})
        return rows + [{"method": label, "failed": reason} for label, reason in self.failed.items()]

    def records(self) -> dict[str, list[Record]]:
        """Return what a report is made of."""
        return {
            label: [
                replace(r.record(label), tuning=self.tuning.get(label), summary=summary)
                for r, summary in zip(runs, self.summaries(label), strict=True)
            ]
            for label, runs in self.all.items()
        }


@taking(Options)
def compare(
    algorithms: Sequence[Algorithm] | Mapping[str, Algorithm],
    federation: Federation,
    model: Any = "linear",
    options: Options | None = None,
    *,
    seeds: int = 1,
    tune: bool | Mapping[str, Sequence[float]] = False,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    **settings: Any,
) -> Comparison:
    """Run every algorithm with the same options (those of ``run``); a mapping gives the labels.

    ``seeds`` repeats each with that many seeds, from ``seed`` on. ``tune`` first tries a small grid of step sizes and penalties
    per method (or the grid given, as ``{"lr": [0.1, 0.3]}``) and keeps what does best on the clients' validation rows. ``out``
    is a directory with a run directory per method and seed; ``resume`` goes on where it was stopped. ``callback`` is given
    every round's record, with the method's ``label`` and the ``stage`` (tune or train).

    A method that fails (in any of its seeds) does not stop the others: ``failed`` of the result says why, and ``error.txt`` in
    the directory has the traceback. An error is raised only where no method could be measured.
    """
    named = _labelled(algorithms)
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise InvalidArgument(f"seeds must be a whole number of at least 1, not {seeds!r}")
    asked = Options.of({**(options.plain() if options else {}), **settings})
    grid = tuning.numbers(tune) if isinstance(tune, Mapping) else None
    model = named_model(model)
    rows, errors = rehearse(named, federation, model, asked)
    if tune:
        tuning.check(list(named.values()), federation, grid)
        if asked.user_clip is not None or any(algorithm.opt.privacy is not None for algorithm in named.values()):
            warnings.warn(TRIALS_COUNT, stacklevel=3)
    with ExitStack() as stack:
        folder = None
        if out is not None:
            described = _config(named, federation, model, {**asked.plain(), "seeds": seeds}, tune)
            folder = stack.enter_context(closing(Folder(Path(out), described, resume)))
        contest = Contest(federation, model, asked, seeds, bool(tune), grid, folder, Listener(callback))
        for label, algorithm in named.items():
            contest.enter(label, algorithm, errors.get(label))
        del rows
        comparison = contest.result()
        if folder is not None:
            summary = {"seed": asked.seed, "seeds": seeds, "table": comparison.table(), "failed": comparison.failed}
            summary |= {"tuning_seconds": comparison.tuning_seconds, "privacy": comparison.privacy}
            folder.finish({label: place(label) for label in named}, summary)
    return comparison


class Listener:
    """Passes records on to the user's callback, and knows an error of the callback from one of a method."""

    def __init__(self, callback: Callback | None) -> None:
        self.callback = callback
        self.error: BaseException | None = None

    def about(self, label: str, stage: str, seed: int) -> Callback | None:
        """Return the callback for the runs of a method, which adds their label, stage and seed."""
        if self.callback is None:
            return None
        callback = self.callback

        def tell(record: dict[str, Any]) -> None:
            try:
                callback({**record, "label": label, "stage": stage, "seed": seed})
            except BaseException as error:
                self.error = error
                raise

        return tell


@dataclass(frozen=True, eq=False)
class Contest:
    """Where methods are tuned and run one after another, and what has come of it so far."""

    federation: Federation
    model: Any
    options: Options
    seeds: int
    tune: bool
    grid: Mapping[str, Sequence[float]] | None
    folder: Folder | None
    listener: Listener
    runs: dict[str, list[Run]] = field(default_factory=dict)
    stories: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    entered: dict[str, Algorithm] = field(default_factory=dict)

    def enter(self, label: str, algorithm: Algorithm, error: Exception | None) -> None:
        """Tune and run a method, or write down why it fails; ``error`` is what its rehearsal came to."""
        seed = self.options.seed
        if error is None:  # one that cannot take a step spends nothing
            self.entered[label] = algorithm
        if self.folder is not None and (failure := self.folder.failure(place(label))) is not None:
            self.failures[label] = failure
            self.stories[label] = self.folder.story(place(label)) or {}
            return
        try:
            if error is not None:
                raise error
            if self.tune:
                algorithm, self.seconds[label] = self._tuned(label, algorithm)
            runs = []
            for seed in range(self.options.seed, self.options.seed + self.seeds):
                runs.append(self._run(label, algorithm, seed))
            self.runs[label] = runs
        except Exception as caught:
            stop_if_noted()
            if caught is self.listener.error or blameless(caught):
                raise
            self.failures[label] = Failure.of(caught, f"seed {seed}: " if self.seeds > 1 else "")
            if self.folder is not None:
                self.folder.fail(place(label), self.failures[label])

    def _tuned(self, label: str, algorithm: Algorithm) -> tuple[Algorithm, float]:
        """Return (the method as tuned, the seconds that it took in this sitting and earlier ones); keep the story."""
        name, began = place(label), time.perf_counter()
        trials = tuning.Trials(
            self.federation, self.model, self.options, self.grid, self.listener.about(label, "tune", self.options.seed)
        )
        folder = self.folder

        def keep(story: dict[str, Any]) -> None:
            nonlocal began
            self.stories[label] = story  # also of a tuning that comes to nothing: its trials were played
            if folder is None or folder.contents.finished:
                return
            folder.keep(name, story)
            folder.add_seconds(label, -began + (began := time.perf_counter()))

        tuned, self.stories[label] = tuning.tune(algorithm, trials, None if folder is None else folder.story(name), keep)
        return tuned, time.perf_counter() - began if folder is None else folder.seconds(label)

    def _run(self, label: str, algorithm: Algorithm, seed: int) -> Run:
        return run(
            algorithm,
            self.federation,
            self.model,
            self.options.but(seed=seed),
            out=None if self.folder is None else self.folder.of(place(label), seed),
            resume=self.folder is not None,
            callback=self.listener.about(label, "train", seed),
        )

    def result(self) -> Comparison:
        """Return the comparison; raise where no method could be measured."""
        reasons = {label: failure.reason for label, failure in self.failures.items()}
        if not self.runs:
            first = next(iter(self.failures.values())).error
            if len(reasons) == 1 and isinstance(first, FedtailorError):
                raise first
            raise NothingMeasured("; ".join(f"{label}: {reason}" for label, reason in reasons.items())) from first
        stories = {label: self.stories[label] for label in self.runs if label in self.stories}
        seconds = {label: self.seconds[label] for label in self.runs if label in self.seconds}
        return Comparison(self.runs, stories, reasons, seconds, self._spent())

    def _spent(self) -> dict[str, Any]:
        """Return what all trials and runs together have spent, those of methods that failed included."""
        ledger = Ledger()
        for label, algorithm in self.entered.items():
            if algorithm.opt.privacy is None and self.options.user_clip is None:
                continue
            for trial in self.stories.get(label, {}).get("trials", ()):
                options = self.options.but(rounds=trial["rounds"], evaluate_every=0, patience=None, callbacks=())
                ledger.add(prepare(replace(algorithm, **trial["settings"]), self.federation, self.model, options))
            tuned = self.runs[label][0].algorithm if label in self.runs else algorithm
            for seed in range(self.options.seed, self.options.seed + self.seeds):
                ledger.add(prepare(tuned, self.federation, self.model, self.options.but(seed=seed)))
        return ledger.total()


def rehearse(
    named: Mapping[str, Algorithm], federation: Federation, model: Any, options: Options
) -> tuple[list[Federation], dict[str, Exception]]:
    """Let a client take a step with each method: one that we refuse to train is refused before anything is written.

    Return the rows as the frozen first layers leave them (while somebody holds them, runs need not compute them again), and the
    errors of methods that what was asked for has no part in. Where no method can take its step, the first is raised.
    """
    rows, errors = [], dict[str, Exception]()
    for label, algorithm in named.items():
        try:
            ready = prepare(algorithm, federation, model, options)
            assert ready.facts
            rows.append(ready.plan.federation)
        except Exception as error:
            stop_if_noted()
            if isinstance(error, FedtailorError) and not isinstance(error, Diverged | InvalidData):
                raise
            errors[label] = error
    if len(errors) == len(named):
        raise next(iter(errors.values()))
    return rows, errors


def total(algorithms: Mapping[str, Algorithm], rounds: int, seeds: int, tune: bool | Mapping[str, Sequence[float]]) -> int:
    """Return the number of rounds that a comparison will play, tuning included."""
    grid = tune if isinstance(tune, Mapping) else None
    return sum(rounds * seeds + (tuning.effort(a, rounds, grid) if tune else 0) for a in algorithms.values())


def _config(
    named: Mapping[str, Algorithm], federation: Federation, model: Any, asked: Mapping[str, Any], tune: Any
) -> dict[str, Any]:
    out = config.describe(next(iter(named.values())), federation, model, asked)
    del out["method"]
    grid = tuning.numbers(tune) if isinstance(tune, Mapping) else None
    asked = {"command": "compare", "methods": list(named), "tune": bool(tune)} | ({"grid": grid} if grid else {})
    return {**out, **asked, "set": {label: {"method": spec(a), **settings(a)} for label, a in named.items()}}


def place(label: str) -> str:
    """Return a label as a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.") or "method"


def _average(values: Sequence[Any]) -> Any:
    if len(values) > 1 and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
        return float(np.mean(values))
    return values[0]


def _labelled(algorithms: Sequence[Algorithm] | Mapping[str, Algorithm]) -> dict[str, Algorithm]:
    """Return the methods by label: their names, numbered where one occurs twice, unless they come with labels."""
    if isinstance(algorithms, Algorithm):
        algorithms = [algorithms]
    if not algorithms:
        raise InvalidArgument("there is nothing to compare; give at least one algorithm")
    if isinstance(algorithms, Mapping):
        out = dict(algorithms)
    else:
        out = {}
        for algorithm in algorithms:
            name = type(algorithm).__name__
            taken = sum(label.split(" ")[0] == name for label in out)
            out[name if not taken else f"{name} {taken + 1}"] = algorithm
    if not all(isinstance(label, str) for label in out):
        raise InvalidArgument(f"labels must be text, not {next(label for label in out if not isinstance(label, str))!r}")
    if len({place(label) for label in out}) < len(out):
        raise InvalidArgument(f"two labels read alike among {', '.join(out)}; give the methods labels that differ in letters")
    return out
