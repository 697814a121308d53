"""Measures of predictions: what they are called, which way is better, and a client's value where it is no mean over rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]
Value = TypeVar("Value", float, Numbers)
SPECIFICITY = 0.9  # at which sensitivity is measured unless another is asked for
RARE = 0.1  # share of the rarer of two classes below which accuracy says little
BINS = 10  # of confidence


@dataclass(frozen=True)
class Metric:
    """``name`` is part of a summary's keys (acc_personal), ``title`` heads columns, ``words`` stand in sentences.

    ``clients(logits, y, real)`` has one number per client from stacked predictions, ``real`` marking the rows (or positions) that
    count; it gives None where the measure does not apply. Without it the measure is the mean over rows of its kind's ``hits``.
    """

    name: str
    title: str
    words: str
    higher: bool = True  # is better
    share: bool = True  # lies between 0 and 1; other measures are positive and drawn on a logarithmic axis
    clients: Callable[[Tensor, Tensor, Tensor], Numbers | None] | None = None
    late: bool = False  # takes time, and is measured at the end only

    def merit(self, value: Value) -> Value:
        """Return the value with its sign such that higher is better; applied to a merit, the value again."""
        return value if self.higher else -value

    def gain(self, ours: Value, theirs: Value) -> Value:
        """Return by how much ours is better than theirs."""
        return ours - theirs if self.higher else theirs - ours

    @property
    def improvement(self) -> str:
        return f"{'rise' if self.higher else 'fall'} of the {self.words}"

    @property
    def with_article(self) -> str:
        return f"{'an' if self.words[0] in 'aeiou' else 'a'} {self.words}"

    def cell(self, value: float) -> str:
        """Return the value as a progress line or a result shows it."""
        return f"{value:.4f}"


def auc(scores: NDArray[Any], positive: NDArray[Any], mask: NDArray[Any]) -> Numbers:
    """Return the area under the ROC curve per client, by ranks (ties count half): scores and labels [clients, rows, labels].

    It is the mean over the labels of which a client has both kinds of rows; NaN if there is none.
    """
    real = mask[:, :, None]
    ranks = _ranks(np.where(real, scores, np.nan))
    p, n = (positive & real).sum(1), (~positive & real).sum(1)
    known = (p > 0) & (n > 0)
    above = np.where(positive & real, ranks, 0).sum(1) - p * (p + 1) / 2
    areas = np.where(known, above / np.where(known, p * n, 1), 0)
    return np.where(known.any(1), areas.sum(1) / np.maximum(known.sum(1), 1), np.nan)


def _ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return ranks along the second axis, from 1 on, ties with their mean; NaN has none. (scipy.stats takes long to import.)"""
    order = np.argsort(values, axis=1, kind="stable")  # NaN comes last
    ascending = np.take_along_axis(values, order, 1)
    place = np.arange(1, values.shape[1] + 1)[None, :, None]
    begins = np.ones(values.shape, bool)  # a group of ties
    begins[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    ends = np.roll(begins, -1, axis=1)  # the first row begins one, and so the last ends one
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    last = np.minimum.accumulate(np.where(ends, place, values.shape[1])[:, ::-1], axis=1)[:, ::-1]
    out = np.empty(values.shape)
    np.put_along_axis(out, order, (first + last) / 2, 1)
    return np.where(np.isnan(values), np.nan, out)


def auc_of_labels(logits: Tensor, y: Tensor, real: Tensor) -> Numbers:
    return auc(logits.double().numpy(), y.reshape(logits.shape).numpy() > 0.5, real.numpy())


def auc_of_two(logits: Tensor, y: Tensor, real: Tensor) -> Numbers | None:
    if logits.shape[-1] != 2:
        return None
    return auc_of_labels((logits[..., 1] - logits[..., 0]).flatten(1).unsqueeze(-1), y.flatten(1), real.flatten(1))


def _by_rank(logits: Tensor, y: Tensor, real: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]] | None:
    """Return how many positives and negatives score at least as high, going down the ranks, and where a group of ties ends.

    All three are [clients, rows]; None where there are no two classes, one per row. The second class is the positive one.
    """
    if logits.shape[-1] != 2 or y.dim() != 2:
        return None
    mask = real.numpy()
    scores = np.where(mask, (logits[..., 1] - logits[..., 0]).double().numpy(), -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")
    scores, positive, mask = (np.take_along_axis(a, order, 1) for a in (scores, y.numpy() > 0, mask))
    ends = np.ones_like(mask)
    ends[:, :-1] = scores[:, 1:] != scores[:, :-1]
    return np.cumsum(positive & mask, 1), np.cumsum(~positive & mask, 1), ends & mask


def average_precision(logits: Tensor, y: Tensor, real: Tensor) -> Numbers | None:
    """Return the mean precision over the positives found, going down the ranks (ties together); NaN without positives."""
    ranked = _by_rank(logits, y, real)
    if ranked is None:
        return None
    right, wrong, ends = ranked
    before = np.maximum.accumulate(np.where(ends, right, 0), 1)
    before = np.concatenate([np.zeros_like(before[:, :1]), before[:, :-1]], 1)
    terms = np.where(ends, (right - before) * right / np.maximum(right + wrong, 1), 0.0)
    return _ratio(terms.sum(1), right[:, -1])


def sensitivity(logits: Tensor, y: Tensor, real: Tensor, specificity: float = SPECIFICITY) -> Numbers | None:
    """Return the largest share of positives found at a threshold that keeps ``specificity`` of the negatives out."""
    ranked = _by_rank(logits, y, real)
    if ranked is None:
        return None
    right, wrong, ends = ranked
    allowed = ends & (wrong <= (1 - specificity) * wrong[:, -1:] + 1e-9)
    caught = np.where(allowed, right, 0).max(1)
    return np.where(wrong[:, -1] > 0, _ratio(caught, right[:, -1]), np.nan)


def _confusion(logits: Tensor, y: Tensor, real: Tensor) -> tuple[Numbers, Numbers, Numbers] | None:
    """Return how many rows of each class are predicted rightly, are predicted, and are there: [clients, classes] each."""
    if y.dim() != 2:
        return None
    classes = np.arange(logits.shape[-1])
    mask = real.numpy()[..., None]
    said, true = ((a.numpy()[..., None] == classes) & mask for a in (logits.argmax(-1), y))
    return (said & true).sum(1).astype(float), said.sum(1).astype(float), true.sum(1).astype(float)


def f1(logits: Tensor, y: Tensor, real: Tensor) -> Numbers | None:
    """Return F1 of the second of two classes; of more, the mean over the classes that are there or predicted."""
    counts = _confusion(logits, y, real)
    if counts is None:
        return None
    right, said, true = counts
    each = _ratio(2 * right, said + true)
    return each[:, 1] if each.shape[1] == 2 else _mean_known(each)


def balanced_accuracy(logits: Tensor, y: Tensor, real: Tensor) -> Numbers | None:
    """Return the share of right rows of each class, mean over the classes that are there."""
    counts = _confusion(logits, y, real)
    return None if counts is None else _mean_known(_ratio(counts[0], counts[2]))


def brier(logits: Tensor, y: Tensor, real: Tensor) -> Numbers | None:
    """Return the squared error of the probabilities, mean over rows: of the second of two classes, or summed over more."""
    if y.dim() != 2:
        return None
    gaps = torch.softmax(logits.double(), -1) - torch.nn.functional.one_hot(y, logits.shape[-1])
    squares = gaps.square().sum(-1) / (2 if logits.shape[-1] == 2 else 1)
    return ((squares * real).sum(1) / real.sum(1)).numpy()


def log_loss(logits: Tensor, y: Tensor, real: Tensor) -> Numbers | None:
    """Return minus the logarithm of the probability given to the row's class, mean over rows."""
    if y.dim() != 2:
        return None
    each = torch.logsumexp(logits.double(), -1) - logits.double().gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((each * real).sum(1) / real.sum(1)).numpy()


def log_loss_of_labels(logits: Tensor, y: Tensor, real: Tensor) -> Numbers:
    """Return the same of labels of 0 or 1, mean over labels and rows."""
    targets = y.reshape(logits.shape).double()
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), targets, reduction="none")
    return ((each.flatten(2).mean(-1) * real).sum(1) / real.sum(1)).numpy()


def calibration_error(logits: Tensor, y: Tensor, real: Tensor) -> Numbers | None:
    """Return the mean gap of confidence and accuracy, over ten bins of confidence (Guo et al. 2017, equation 3)."""
    if y.dim() != 2:
        return None
    confidence, said = torch.softmax(logits.double(), -1).max(-1)
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    excess = (confidence - (said == y).double()) * real
    gaps = torch.stack([(excess * (bins == k)).sum(1).abs() for k in range(BINS)])
    return (gaps.sum(0) / real.sum(1)).numpy()


def _errors(logits: Tensor, y: Tensor) -> Tensor:
    """Return prediction minus target, [clients, rows, outputs]."""
    return logits.double().reshape(*logits.shape[:2], -1) - y.double().reshape(*y.shape[:2], -1)


def absolute_error(logits: Tensor, y: Tensor, real: Tensor) -> Numbers:
    """Return the mean absolute error."""
    return ((_errors(logits, y).abs().mean(-1) * real).sum(1) / real.sum(1)).numpy()


def root_squared_error(logits: Tensor, y: Tensor, real: Tensor) -> Numbers:
    """Return the root of the mean squared error."""
    return ((_errors(logits, y).square().mean(-1) * real).sum(1) / real.sum(1)).sqrt().numpy()


def determination(logits: Tensor, y: Tensor, real: Tensor) -> Numbers:
    """Return 1 minus the squared error over that of the mean of the rows' own targets; NaN where these do not vary."""
    weight = real.unsqueeze(-1).double()
    targets = y.double().reshape(*y.shape[:2], -1)
    middle = (targets * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
    around = ((targets - middle).square() * weight).sum((1, 2)).numpy()
    left = (_errors(logits, y).square() * weight).sum((1, 2)).numpy()
    return 1 - _ratio(left, around)


def _ratio(part: NDArray[Any], whole: NDArray[Any]) -> Numbers:
    return np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)


def _mean_known(values: Numbers) -> Numbers:
    known = ~np.isnan(values)
    return _ratio(np.where(known, values, 0.0).sum(1), known.sum(1))


ACCURACY = Metric("acc", "accuracy", "accuracy")
RIGHT_LABELS = Metric("acc", "accuracy", "share of right labels")
SQUARED_ERROR = Metric("mse", "MSE", "mean squared error", higher=False, share=False)
AUC = Metric("auc", "AUC", "area under the ROC curve", clients=auc_of_two)
AUC_OF_LABELS = replace(AUC, clients=auc_of_labels)
LOG_LOSS = Metric("log_loss", "log loss", "log loss", higher=False, share=False, clients=log_loss, late=True)
LOG_LOSS_OF_LABELS = replace(LOG_LOSS, clients=log_loss_of_labels)
OF_CLASSES = (
    AUC,
    Metric("ap", "average precision", "average precision", clients=average_precision, late=True),
    Metric("f1", "F1", "F1 score", clients=f1, late=True),
    Metric("balanced", "balanced accuracy", "balanced accuracy", clients=balanced_accuracy, late=True),
    Metric("sensitivity", "sensitivity", "sensitivity at a specificity of 0.9", clients=sensitivity, late=True),
    LOG_LOSS,
    Metric("brier", "Brier score", "Brier score", higher=False, clients=brier, late=True),
    Metric("ece", "calibration error", "calibration error", higher=False, clients=calibration_error, late=True),
)
OF_NUMBERS = (
    Metric("mae", "MAE", "mean absolute error", higher=False, share=False, clients=absolute_error, late=True),
    Metric("rmse", "RMSE", "root mean squared error", higher=False, share=False, clients=root_squared_error, late=True),
    Metric("r2", "R²", "coefficient of determination", share=False, clients=determination, late=True),
)
SCORES = {score.name: score for score in (ACCURACY, SQUARED_ERROR, *OF_CLASSES, *OF_NUMBERS)}
ALIASES = {
    "accuracy": "acc",
    "average_precision": "ap",
    "balanced_accuracy": "balanced",
    "calibration_error": "ece",
    "logloss": "log_loss",
}


def named(name: str, known: Iterable[Metric]) -> Metric | None:
    """Return the measure of this name among those known, under one of its names; ``sensitivity@0.95`` sets the specificity."""
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    by_name = {metric.name: metric for metric in known}
    at = re.fullmatch(r"sensitivity(?:@|_at_)0?\.(\d{1,4})", plain)
    if at and "sensitivity" in by_name and float(f"0.{at[1]}") > 0:
        specificity = float(f"0.{at[1]}")
        return Metric(
            f"sensitivity_at_{specificity:g}",
            f"sensitivity at {specificity:g}",
            f"sensitivity at a specificity of {specificity:g}",
            clients=partial(sensitivity, specificity=specificity),
        )
    return by_name.get(name) or by_name.get(ALIASES.get(plain, plain))


def score_named(name: Any) -> Metric:
    """Return the main score of this name in a file; accuracy if the file names none, and a measure of the user's own as it is."""
    if not isinstance(name, str):
        return ACCURACY
    return named(name, SCORES.values()) or Metric(name, name, name, share=False)
