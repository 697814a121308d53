"""``compare``: several methods on the same splits, seeds and start."""

from __future__ import annotations

import os
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
from fedtailor.data.redeal import fits_anew, overlap
from fedtailor.engine import tune as tuning
from fedtailor.engine import yardsticks as sticks
from fedtailor.engine.checked import taking
from fedtailor.engine.contest import Contest, Listener, place
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import prepare
from fedtailor.engine.repeats import Repeats, splits_of
from fedtailor.engine.run import Callback
from fedtailor.engine.setup import named_model
from fedtailor.engine.spread import Spread, serves
from fedtailor.errors import Diverged, FedtailorError, InvalidArgument, InvalidData, NothingMeasured
from fedtailor.runs import config
from fedtailor.runs.folder import Folder
from fedtailor.runs.history import Run
from fedtailor.runs.patience import stop_if_noted
from fedtailor.runs.record import Record

TRIALS_COUNT = "the trials of tuning look at the clients' rows too: they are counted in epsilon of all runs together"

STAYS_SCALED = "columns stay scaled and filled as for the first split, because the rows are not as they were read from the table"


@dataclass(frozen=True, eq=False)
class Comparison(Mapping[str, Run]):
    """Runs by label: the method's name, numbered where a method occurs twice.

    As a mapping it gives the first run; ``all`` has one per seed, of the split that the federation came with, ``others`` the
    records of the other splits. ``tuning`` says how each method's settings were chosen and ``tuning_seconds`` how long that took.
    ``failed`` says of the methods that could not be measured why. ``privacy`` is what all runs and trials together have spent,
    where they are private. ``yardsticks`` are no methods: a record for every split of each; ``overlap`` is the share of test to
    training rows where there are several splits.
    """

    all: Mapping[str, Sequence[Run]]
    tuning: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    tuning_seconds: Mapping[str, float] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    yardsticks: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    overlap: float | None = None

    def __getitem__(self, label: str) -> Run:
        return self.all[label][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def summaries(self, label: str) -> list[dict[str, Any]]:
        """Return a method's summary per split and seed, with the time that its tuning took, and what all runs have spent."""
        more: dict[str, Any] = {"tuning_seconds": self.tuning_seconds[label]} if label in self.tuning_seconds else {}
        if self.overlap is not None:
            more |= {"overlap": self.overlap}
        first = [{**r.summary, **({} if self.overlap is None else {"split": 0})} for r in self.all[label]]
        every = [*first, *(record.summary for record in self.others.get(label, ()))]
        return [{**summary, **more, **self._composed(summary)} for summary in every]

    def _composed(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return what all runs together have spent, of the kinds of privacy that a run has."""
        of_rows, of_clients = "noise" in summary, "user_noise" in summary
        return {key: value for key, value in self.privacy.items() if (of_clients if key.startswith("user_") else of_rows)}

    def table(self, *columns: str) -> list[dict[str, Any]]:
        """Return a row per method: its label and the summary (or the columns named), numbers averaged over splits and seeds.

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
        out = {}
        for label, runs in self.all.items():
            first = [replace(r.record(label), tuning=self.tuning.get(label)) for r in runs]
            every = [*first, *self.others.get(label, ())]
            out[label] = [replace(record, summary=s) for record, s in zip(every, self.summaries(label), strict=True)]
        return out


@taking(Options)
def compare(
    algorithms: Sequence[Algorithm] | Mapping[str, Algorithm],
    federation: Federation,
    model: Any = "linear",
    options: Options | None = None,
    *,
    seeds: int = 1,
    splits: int | str = 1,
    yardsticks: Sequence[str] = sticks.ALWAYS,
    tune: bool | Mapping[str, Sequence[float]] = False,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    **settings: Any,
) -> Comparison:
    """Run every algorithm with the same options (those of ``run``); a mapping gives the labels.

    ``seeds`` repeats each with that many seeds, from ``seed`` on; ``splits`` repeats all of it with the clients' rows split anew,
    so that other rows test (columns of a table are fitted anew); with "5-fold" every row tests once. ``yardsticks`` are what
    scores are held against: the majority class and one model of all rows in one place always stand there, "boosting" adds
    scikit-learn's, "none" leaves them out. ``tune`` first tries a small grid of step sizes and penalties per method (or the grid
    given, as ``{"lr": [0.1, 0.3]}``), on every split, and keeps what does best on the clients' validation rows. ``out`` is a
    directory with a run directory per method, split and seed; ``resume`` goes on where it was stopped. ``callback`` is given
    every round's record, with the method's ``label`` and the ``stage`` (tune or train).

    A method that fails (in any of its seeds) does not stop the others: ``failed`` of the result says why, and ``error.txt`` in
    the directory has the traceback. An error is raised only where no method could be measured.
    """
    named = _labelled(algorithms)
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise InvalidArgument(f"seeds must be a whole number of at least 1, not {seeds!r}")
    asked = Options.of({**(options.plain() if options else {}), **settings})
    grid = tuning.numbers(tune) if isinstance(tune, Mapping) else None
    lengths, repeats = sticks.names_of(yardsticks), Repeats(asked.seed, seeds, *splits_of(splits))
    model = named_model(model)
    rows, errors = rehearse(named, federation, model, asked)
    if repeats.splits > 1 and federation.schema is not None and not fits_anew(federation):
        warnings.warn(STAYS_SCALED, stacklevel=3)
    if tune:
        tuning.check(list(named.values()), federation, grid)
        if asked.user_clip is not None or any(algorithm.opt.privacy is not None for algorithm in named.values()):
            warnings.warn(TRIALS_COUNT, stacklevel=3)
    with ExitStack() as stack:
        folder = None
        if out is not None:
            more: dict[str, Any] = {"seeds": seeds, **({"splits": splits} if repeats.splits > 1 else {})}
            more |= {} if lengths == sticks.ALWAYS else {"yardsticks": list(yardsticks)}
            described = _config(named, federation, model, {**asked.plain(), **more}, tune)
            folder = stack.enter_context(closing(Folder(Path(out), described, resume)))
        spread = stack.enter_context(closing(Spread(model, asked))) if _goes_afar(asked, named, folder) else None
        contest = Contest(federation, model, asked, repeats, bool(tune), grid, folder, Listener(callback), spread)
        contest.send_ahead({label: algorithm for label, algorithm in named.items() if label not in errors})
        for label, algorithm in named.items():
            contest.enter(label, algorithm, errors.get(label))
        del rows
        comparison = _result(contest, lengths)
        if folder is not None:
            folder.finish({label: place(label) for label in named}, _summary(comparison, repeats))
    return comparison


def _summary(comparison: Comparison, repeats: Repeats) -> dict[str, Any]:
    """Return what the folder of a comparison says of all its runs."""
    out = {"seed": repeats.seed, "seeds": repeats.seeds, "table": comparison.table(), "failed": comparison.failed}
    out |= {"tuning_seconds": comparison.tuning_seconds, "privacy": comparison.privacy}
    return out | ({} if comparison.overlap is None else {"splits": repeats.splits, "overlap": comparison.overlap})


def _goes_afar(options: Options, named: Mapping[str, Algorithm], folder: Folder | None) -> bool:
    """Return whether there are runs to be played by a cluster."""
    return serves(options, list(named.values())) and not (folder is not None and folder.contents.finished)


def _result(contest: Contest, yardsticks: Sequence[str]) -> Comparison:
    """Return the comparison; raise where no method could be measured."""
    reasons = {label: failure.reason for label, failure in contest.failures.items()}
    if not contest.runs:
        first = next(iter(contest.failures.values())).error
        if len(reasons) == 1 and isinstance(first, FedtailorError):
            raise first
        raise NothingMeasured("; ".join(f"{label}: {reason}" for label, reason in reasons.items())) from first
    return Comparison(
        contest.runs,
        {label: contest.stories[label] for label in contest.runs if label in contest.stories},
        reasons,
        {label: contest.seconds[label] for label in contest.runs if label in contest.seconds},
        contest.spent(),
        contest.others,
        contest.yardsticks(yardsticks),
        overlap(contest.dealt(0)) if contest.repeats.splits > 1 else None,
    )


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


def total(
    algorithms: Mapping[str, Algorithm], rounds: int, seeds: int, tune: bool | Mapping[str, Sequence[float]], splits: Any = 1
) -> int:
    """Return the number of rounds that a comparison will play, tuning included."""
    grid = tune if isinstance(tune, Mapping) else None
    return splits_of(splits)[0] * sum(
        rounds * seeds + (tuning.effort(a, rounds, grid) if tune else 0) for a in algorithms.values()
    )


def _config(
    named: Mapping[str, Algorithm], federation: Federation, model: Any, asked: Mapping[str, Any], tune: Any
) -> dict[str, Any]:
    out = config.describe(next(iter(named.values())), federation, model, asked)
    del out["method"]
    grid = tuning.numbers(tune) if isinstance(tune, Mapping) else None
    asked = {"command": "compare", "methods": list(named), "tune": bool(tune)} | ({"grid": grid} if grid else {})
    return {**out, **asked, "set": {label: {"method": spec(a), **settings(a)} for label, a in named.items()}}


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
