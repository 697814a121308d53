"""What a report rests on: the methods side by side, client by client and seed by seed, and the one that validation chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.algorithms import registry
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.metrics.paired import Paired, Runs, holm, paired
from fedtailor.metrics.verdict import Candidate, Verdict, best_first, judge, unknown
from fedtailor.runs.record import Record
from fedtailor.task.kinds import CLASSIFICATION, kind_of
from fedtailor.task.scores import Metric, named, score_named

Numbers = NDArray[np.float64]
Results = Mapping[str, Sequence[Record]]
ONLY_LOCAL = "Only local training was run: add a method that learns together, such as FedAvg or Ditto, to see whether it helps."


@dataclass(frozen=True)
class Average:
    """A summary's measure over splits, or over seeds where there is one split; no deviation with one run."""

    mean: float
    deviation: float | None


@dataclass(frozen=True, eq=False)
class Evidence:
    """Records by label, one per split and seed; every measure as [runs, clients], by the clients' names."""

    results: Results
    failed: Mapping[str, str] = field(default_factory=dict)  # methods that could not be measured, and why
    yardsticks: Results = field(default_factory=dict)  # no methods: what these are held against, a record per split

    def __post_init__(self) -> None:
        _check(self.results)

    @property
    def records(self) -> list[Record]:
        return [record for records in self.results.values() for record in records]

    @property
    def kind(self) -> str:
        return self.records[0].kind

    @property
    def score(self) -> Metric:
        return score_of({"kind": self.kind, **self.records[0].summary})

    @property
    def name(self) -> str:
        return self.score.name

    @cached_property
    def runs(self) -> list[tuple[int, Any]]:
        """The (split, seed) of every run of a method."""
        return list(dict.fromkeys(key for records in self.results.values() for key in _runs(records)))

    @cached_property
    def seeds(self) -> list[Any]:
        return list(dict.fromkeys(seed for _, seed in self.runs))

    @cached_property
    def splits(self) -> list[int]:
        return list(dict.fromkeys(split for split, _ in self.runs))

    @cached_property
    def clients(self) -> list[str]:
        return list(dict.fromkeys(name for record in self.records for name in record.names))

    # -- one method --------------------------------------------------------------------------------------------------
    def average(self, label: str, key: str) -> Average | None:
        """Average a number of the summaries over splits and seeds; None unless every run has it."""
        records = self.results[label] if label in self.results else self.yardsticks[label]
        values = [number(record.summary.get(key)) for record in records]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        by_split: dict[int, list[float]] = {}
        for (split, _), value in zip(_runs(records), known, strict=True):
            by_split.setdefault(split, []).append(value)
        varying = [float(np.mean(part)) for part in by_split.values()] if len(by_split) > 1 else known
        return Average(float(np.mean(known)), float(np.std(varying, ddof=1)) if len(varying) > 1 else None)

    def at_threshold(self, label: str) -> dict[str, float | None]:
        """Return a method's threshold of two classes and what it gives on test rows, mean over its runs; nothing without one."""
        measures = [
            {"threshold": record.summary["threshold"]}
            | {key: value for key, value in record.summary.get("at_threshold", {}).items() if key != "class"}
            for record in self.results[label]
            if number(record.summary.get("threshold")) is not None
        ]
        known = {
            key: [value for at in measures if (value := number(at[key])) is not None] for key in (measures[0] if measures else ())
        }
        return {key: float(np.mean(values)) if values else None for key, values in known.items()}

    def measures(self, label: str, key: str) -> Numbers:
        """Return a measure per client, [runs, clients], NaN where there is none."""
        out = np.full((len(self.runs), len(self.clients)), np.nan)
        records = self.results[label]
        for run, record in zip(_runs(records), records, strict=True):
            if key in record.clients:
                out[self.runs.index(run), self._places(record)] = record.clients[key]
        return out

    def per_client(self, label: str, key: str) -> Numbers:
        """Return a measure per client, mean over the runs that know it."""
        values = self.measures(label, key)
        known = np.isfinite(values)
        count = known.sum(0)
        return np.where(count > 0, np.where(known, values, 0.0).sum(0) / np.maximum(count, 1), np.nan)

    def algorithm(self, label: str) -> str:
        return str(self.results[label][0].summary.get("algorithm", label))

    def yardstick(self, label: str) -> str | None:
        """Return what this method is a yardstick for, "alone" or "together", if it is one of ours (``Algorithm.yardstick``)."""
        method = None if ":" in self.results[label][0].summary.get("source", "") else registry.get(self.algorithm(label))
        return None if method is None else method.yardstick

    def _places(self, record: Record) -> Any:
        if list(record.names) == self.clients:
            return slice(None)
        return [self._index[name] for name in record.names]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.clients)}

    # -- choosing ----------------------------------------------------------------------------------------------------
    @cached_property
    def validation(self) -> dict[str, float]:
        """Scores on validation of the methods that have one in every run, best first (``best_first``)."""
        scores = {label: average.mean for label in self.results if (average := self.average(label, self.judged_by)) is not None}
        labels = list(scores)
        order = best_first([self._candidate(label, scores[label]) for label in labels], self.score)
        return {labels[place]: scores[labels[place]] for place in order}

    def _candidate(self, label: str, mean: float) -> Candidate:
        """Return what a method is chosen by; of runs of an earlier version only the mean is known, so that the loss settles
        ties."""
        loss = self.average(label, "val_loss_personal")
        lost, key = math.inf if loss is None else loss.mean, f"val_{self.name}_personal"
        if not all(key in record.clients for record in self.records):
            return Candidate(np.array([mean]), np.ones(1), lost)
        return Candidate(self.measures(label, key), self.measures(label, "val_rows"), lost, self._repeats)

    @property
    def _repeats(self) -> Runs:
        overlap = max(number(record.summary.get("overlap")) or 0.0 for record in self.records)
        return Runs([split for split, _ in self.runs], overlap)

    @cached_property
    def highest(self) -> str | None:
        """The method with the best mean on validation, from which the one chosen may be within a standard error."""
        return max(self.validation, key=lambda label: self.score.merit(self.validation[label]), default=None)

    @property
    def judged_by(self) -> str:
        """The key of the summaries that methods are chosen by; an earlier version wrote the plain mean over clients only."""
        weighted = all(number(record.summary.get("val_score")) is not None for record in self.records)
        return "val_score" if weighted else f"val_{self.name}_personal"

    @property
    def order(self) -> list[str]:
        """Labels by validation; those without a score last, as they were given."""
        return [*self.validation, *(label for label in self.results if label not in self.validation)]

    @property
    def best(self) -> str | None:
        """The method chosen on validation. Test rows choose nothing: without validation there is no best of several."""
        return next(iter(self.validation), None) if len(self.results) > 1 else next(iter(self.results))

    @cached_property
    def subject(self) -> str:
        """The method that words and pictures are about: the best that learns together, or the first without validation."""
        passed_over = [("alone",)] if self.best is not None else [("alone", "together"), ("alone",)]
        candidates = (label for names in passed_over for label in self.order if self.yardstick(label) not in names)
        return next(candidates, self.order[0])

    @cached_property
    def local(self) -> str | None:
        return next((label for label in self.order if self.yardstick(label) == "alone"), None)

    @cached_property
    def together(self) -> str | None:
        """The method with plainly one model for all."""
        return next((label for label in self.order if self.yardstick(label) == "together"), None)

    # -- comparing ---------------------------------------------------------------------------------------------------
    def against(self, ours: str, theirs: str, key: str | None = None) -> Paired | None:
        """Compare personal models of one method with another's (or its ``key``), over the clients with the same test rows."""
        a, b = self._pair(ours, theirs, key or f"{self.name}_personal")
        if not (np.isfinite(a) & np.isfinite(b)).any():
            return None
        rows = self.measures(ours, "rows")
        return paired(self.score, a, b, None if np.isnan(rows).all() else rows, self._repeats)

    @cached_property
    def verdict(self) -> Verdict:
        """Return whether learning together helps: the subject against local training."""
        gains, tuned = self.against_local, None if len(self.results) == 1 else self.tuned
        if self.yardstick(self.subject) == "alone":
            return unknown(self.subject, self.score, ONLY_LOCAL)
        if gains is None:
            missing = f"and {self.subject} measured no client in common" if self.local else "is not among the methods"
            return unknown(self.subject, self.score, f"Whether learning together helps is not known: Local {missing}.", tuned)
        return judge(self.subject, gains, self.score, scale=self.scale, tuned=tuned)

    @property
    def tuned(self) -> bool:
        """Return whether the settings of all methods were chosen on validation."""
        return all(record.tuning is not None for record in self.records)

    @property
    def scale(self) -> float:
        """A number of the size of the score: gains are written with its digits."""
        reached = self.average(self.subject, f"{self.name}_personal")
        return 1.0 if self.score.share or reached is None else reached.mean

    @cached_property
    def alike(self) -> list[str]:
        """The methods that the test does not tell from the best."""
        return [label for label in self.order if label != self.best and self.p_values.get(label, 0.0) >= 0.05]

    @cached_property
    def against_local(self) -> Paired | None:
        return None if self.local in (None, self.subject) else self.against(self.subject, str(self.local))

    @property
    def sharer(self) -> str | None:
        """The method whose shared model is the rival: FedAvg, or the subject itself."""
        if self.together is not None:
            return self.together if self.together != self.subject else None
        return self.subject

    @cached_property
    def against_shared(self) -> Paired | None:
        """The subject against FedAvg's one model for all."""
        return None if self.sharer is None else self.against(self.subject, self.sharer, f"{self.name}_global")

    @cached_property
    def own_gain(self) -> Paired | None:
        """The subject's personal models against its own shared model."""
        return self.against(self.subject, self.subject, f"{self.name}_global")

    @cached_property
    def p_values(self) -> dict[str, float]:
        """Every other method against the best, corrected for their number; none where no test is possible. Where the verdict is
        about the same two methods, its question is one by itself and has one answer: its p is left as it is, and not counted."""
        if self.best is None:
            return {}
        gains = {label: self.against(self.best, label) for label in self.results if label != self.best}
        tested = {label: gain.p for label, gain in gains.items() if gain is not None and gain.over is not None}
        judged = {self.subject, self.local} - {self.best} if self.best in (self.subject, self.local) else set()
        others = [label for label in tested if label not in judged]
        return tested | dict(zip(others, holm([tested[label] for label in others]), strict=True))

    @cached_property
    def unequal_rows(self) -> bool:
        """Is a client tested on other rows by one method than by another in the same seed?"""
        first, *others = (self.measures(label, "rows") for label in self.results)
        return any((np.isfinite(first) & np.isfinite(rows) & (first != rows)).any() for rows in others)

    def _pair(self, ours: str, theirs: str, key: str) -> tuple[Numbers, Numbers]:
        a, b = self.measures(ours, f"{self.name}_personal"), self.measures(theirs, key)
        same_rows = self.measures(ours, "rows") == self.measures(theirs, "rows")
        unknown_rows = np.isnan(self.measures(ours, "rows")) & np.isnan(self.measures(theirs, "rows"))
        return a, np.where(same_rows | unknown_rows, b, np.nan)


def score_of(summary: Mapping[str, Any]) -> Metric:
    """Return the score that a run is judged by; a summary of an earlier version names the kind of task only."""
    kind = kind_of(summary.get("kind", CLASSIFICATION))
    name = summary.get("score")
    return kind.score if name is None else named(str(name), kind.metrics) or score_named(name)


def number(value: Any) -> float | None:
    """Return a value as a finite number, or None."""
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return float(value) if real and math.isfinite(value) else None


def _runs(records: Sequence[Record]) -> list[tuple[int, Any]]:
    return [(int(record.summary.get("split", 0)), record.summary.get("seed", place)) for place, record in enumerate(records)]


def _check(results: Results) -> None:
    if not results:
        raise InvalidArgument("there is nothing to report; give at least one run")
    kinds = {}
    for label, records in results.items():
        if not records:
            raise InvalidArgument(f"{label!r} has no run to report; leave it out or run it")
        if len(set(_runs(records))) < len(records):
            raise InvalidArgument(f"{label!r} has two runs with the same seed; give one run per seed, or another label")
        for record in records:
            kinds[record.kind] = label
            if any(len(column) != len(record.names) for column in record.clients.values()):
                raise InvalidData(
                    f"a run of {label!r} has measures of other clients than its {len(record.names)} names; run it again"
                )
            if len(set(record.names)) < len(record.names):
                raise InvalidData(f"a run of {label!r} names a client twice; give every client a name of its own")
    if len(kinds) > 1:
        listed = ", ".join(f"{kind} ({label})" for kind, label in kinds.items())
        raise InvalidArgument(f"the runs are of different kinds: {listed}; make a report of each")
