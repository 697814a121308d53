"""The user's own pieces of a task: a loss, weights of the classes, measures, a start (``start.py``).

Functions are named by where they are to be found (``mine.py:my_loss``), so that a run directory can say it; one that is in no
file ties the run to the Python process that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.algorithms import origin
from fedtailor.data import rng
from fedtailor.data.augment import TRIED, Augment
from fedtailor.data.federation import Federation
from fedtailor.data.words import shown
from fedtailor.engine.options import Options, is_huber
from fedtailor.engine.start import started
from fedtailor.errors import InvalidArgument, nearest
from fedtailor.task import Task
from fedtailor.task.robust import huber
from fedtailor.task.scores import ALIASES, AUC, RARE, SCORES, Metric, Numbers, named

Function = Callable[..., Any]
ONE_SIDED = ("ap", "f1", "sensitivity")  # of two classes they look for the second


def with_pieces(task: Task, federation: Federation, options: Options) -> Task:
    """Return the task with the loss, the measures and the start that were asked for."""
    if is_huber(options.loss):
        assert options.loss is not None
        if not federation.kind.least_squares:
            raise InvalidArgument(f"huber is a loss of numbers and the task is {federation.kind}; leave it out")
        loss, note = huber(options.loss, federation.train.y)
        task = replace(task, example_loss=loss, notes=(*task.notes, note))
    elif options.loss is not None:
        task = replace(task, example_loss=origin.function_of(options.loss))
    if options.class_weights is not None:
        weights = torch.tensor(class_weights(federation, options.class_weights), dtype=torch.float64)
        task = replace(task, example_loss=Weighted(task.example_loss, weights))
    if options.metrics:
        task = _measured(task, options.metrics)
    task = scored_by(task, federation, options.score)
    return task if options.start is None else started(task, options.start)


def batch_length(federation: Federation, options: Options) -> int:
    """Return how many rows the longest batch has; without a batch size a batch is all rows of a client."""
    longest = int(federation.train.sizes.max())
    return longest if options.batch_size is None else min(longest, options.batch_size)


def shortest_batch(federation: Federation, options: Options) -> int:
    """Return how many rows the shortest batch has: the last of a client, which may be shorter than the others."""
    sizes, size = federation.train.sizes, options.batch_size or int(federation.train.sizes.max())
    return max(1, int(np.where(sizes <= size, sizes, (sizes - 1) % size + 1).min()))


def augmented_by(asked: str | None, federation: Federation, length: int) -> Augment | None:
    """Return the augmentation that was asked for, tried on a few rows and on a batch of this length."""
    if asked is None:
        return None
    if federation.tokens:
        raise InvalidArgument("augment is for rows of numbers, and these are tokens; give them as a part: x={'ids': ...}")
    augment = Augment(origin.function_of(asked), origin.name_of(asked), federation.packing)
    augment.check(federation.few(max(TRIED, length))[0], length)
    return augment


def scored_by(task: Task, federation: Federation, asked: str | None) -> Task:
    """Return the task with the score that was asked for; by default the kind's, or AUC where one of two classes is rare."""
    if asked is None:
        rare = None if federation.per_position else rare_share(federation)
        if rare is None or rare >= RARE or task.unscored is not None:
            return task
        why = (
            f"Judged by AUC: {rare:.1%} of the training rows are of the rarer class, so {1 - rare:.1%} would be right by always "
            "saying the other one, and accuracy hardly tells methods apart; --score chooses another score."
        )
        auc = next((metric for metric in task.metrics if metric.name == AUC.name), AUC)
        return replace(task, lead=auc, notes=(*task.notes, why))
    known = (*task.kind.metrics, *task.metrics)
    score = named(asked, known)
    if score is None:
        words = [metric.name for metric in known] + list(ALIASES if task.kind.softmax else ())
        raise InvalidArgument(f"no score {asked!r} for {task.kind}; {nearest(asked, words, 'the scores are')}")
    if score not in task.metrics:
        _check_score(score, task, federation)
        task = replace(task, notes=(*task.notes, *_about_class(score, federation)))
    return replace(task, lead=score)


def _about_class(score: Metric, federation: Federation) -> list[str]:
    """Say which of two classes a score is about, where it is about one."""
    if not federation.kind.softmax or len(federation.classes) != 2 or not score.name.startswith(ONE_SIDED):
        return []
    name = shown(federation.classes[1])
    return [
        f"The {score.title} is of the class {name}, the second in order; a file for --columns may name the classes otherwise."
    ]


def _check_score(score: Metric, task: Task, federation: Federation) -> None:
    """Refuse a score of ours that these labels do not have."""
    of_two = ("auc", "ap", "sensitivity")
    if task.kind.softmax and (federation.labels != 2 or federation.per_position) and score.name.startswith(of_two):
        raise InvalidArgument(f"{score.title} is of two classes and there are {federation.labels}; use accuracy or log_loss")
    if federation.per_position and score.clients is not None:
        raise InvalidArgument(f"{score.title} is of one label per row and here every position has one; use accuracy")


def rare_share(federation: Federation) -> float | None:
    """Return the share of the rarer of two classes in all clients' training rows; None where there are not two."""
    if not federation.kind.softmax or federation.labels != 2:
        return None
    counts = class_counts(federation)
    share = float(counts[1] / counts.sum())
    return min(share, 1 - share) or None


@dataclass(frozen=True, eq=False)
class Weighted:
    """A loss of which every row counts with the weight of its class."""

    loss: Function
    weights: Tensor

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.loss(logits, y) * self.weights.to(logits)[y]


def class_weights(federation: Federation, asked: str | Sequence[float]) -> list[float]:
    """Return a weight per class; balanced: rows / (classes * rows of the class), over all clients' training rows."""
    if not federation.kind.softmax or federation.per_position:
        raise InvalidArgument("class_weights are for classification with one label per row; leave them out")
    if not isinstance(asked, str):
        if len(asked) != federation.labels:
            raise InvalidArgument(f"class_weights has {len(asked)} numbers for {federation.labels} classes; give one for each")
        return list(asked)
    counts = class_counts(federation).clamp(min=1)
    return (counts.sum() / (len(counts) * counts)).tolist()


def class_counts(federation: Federation) -> Tensor:
    """Return how many of all clients' training rows are of each class."""
    if federation.shards is None:
        return torch.bincount(federation.train.y, minlength=federation.labels).double()
    assert federation.shards.counts is not None
    return torch.from_numpy(federation.shards.counts.sum(0)).double()


def metric_name(entry: str) -> str:
    """Return what a measure of one's own is called: the name before ``=``, or else the function's."""
    name, equals, _ = entry.partition("=")
    return name if equals else entry.rpartition(":")[2].partition("@")[0]


def _measured(task: Task, asked: Sequence[str]) -> Task:
    """Return the task with measures of one's own; one with the name of a measure of ours takes its place, which is noted."""
    metrics = tuple(_metric(entry, task) for entry in asked)
    if len({metric.name for metric in metrics}) < len(metrics):
        raise InvalidArgument("two metrics have the same name; name them, as in metrics={'f1': function}")
    ours = [metric.name for metric in metrics if metric.name in SCORES]
    notes = (f"{name} is the function that was given, not the measure of that name that comes with the package." for name in ours)
    return replace(task, metrics=metrics, notes=(*task.notes, *notes))


def _metric(entry: str, task: Task) -> Metric:
    name, spec = metric_name(entry), entry.partition("=")[2] or entry
    function = origin.function_of(spec)
    if not name.isidentifier() or name in ("loss", task.kind.score.name):
        why = "which is no name" if not name.isidentifier() else "by which every run is measured"
        raise InvalidArgument(
            f"a metric cannot be called {name!r}, {why}; give it another, as in metrics={{'my_measure': function}}"
        )
    known = SCORES.get(name, Metric(name, name, name))  # a name of ours says which way is better
    return replace(known, clients=_PerClient(name, function), late=False)


@dataclass(frozen=True, eq=False)
class _PerClient:
    """A measure of one client's real rows as a measure of stacked predictions."""

    name: str
    function: Function

    def __call__(self, logits: Tensor, y: Tensor, real: Tensor) -> Numbers:
        return np.array([self._one(*pair) for pair in zip(logits, y, real, strict=True)], np.float64)

    def _one(self, logits: Tensor, y: Tensor, real: Tensor) -> float:
        try:
            with rng.seeded(0):  # a measure that draws (a bootstrap) is a function of what it measures
                return float(self.function(logits[real], y[real]))
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InvalidArgument(
                f"the metric {self.name} fails on a client's {int(real.sum())} rows ({text}); let it return one number, or "
                "nan where a client has none"
            ) from error
