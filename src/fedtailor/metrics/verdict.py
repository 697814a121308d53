"""The verdict: does learning together help, in one sentence; and which of several is best. Terminal, pages and json all take it
from here, whoever asks: a comparison, an advice, a sweep, sites, or a client that comes later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from fedtailor.metrics.paired import FEWEST, Numbers, Paired, Runs, paired
from fedtailor.metrics.spread import weighted_mean
from fedtailor.task.scores import Metric

HELPS, HURTS, OPEN, FEW, UNKNOWN = "helps", "hurts", "open", "too few clients", "not known"
CLEAR = "clear"  # of a lead
TUNE = "Settings were not tuned (defaults where none were given); --tune chooses them on validation rows."


@dataclass(frozen=True)
class Verdict:
    """Whether ``method`` is better than ``rival`` (local training, or the shared model of a newcomer) by one score and one test;
    ``sentence`` says it all.

    ``outcome`` is "helps", "hurts", "open" (chance may explain it), "too few clients" (to tell) or "not known" (no rival was
    run). ``gain`` is the clients' weighted mean, positive where ``method`` is better, with its 95 % interval, ``plain_gain`` the
    mean in which all clients count alike, as in tables of scores; ``over`` says whether chance was seen in clients, splits or a
    client's rows; ``tuned`` is None where that is no question.
    """

    outcome: str
    sentence: str
    method: str
    rival: str | None = None
    score: str = ""
    rows: str = "test"
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    clients: int = 0
    splits: int = 1
    over: str | None = None
    tuned: bool | None = None
    plain_gain: float | None = None

    def json(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return asdict(self)


def unknown(method: str, score: Metric, why: str, tuned: bool | None = None) -> Verdict:
    """Return that it is not known, and why."""
    return Verdict(UNKNOWN, why, method, score=score.name, tuned=tuned)


def judge(
    method: str,
    gains: Paired,
    score: Metric,
    *,
    scale: float | None = None,
    rows: str = "test",
    tuned: bool | None = None,
    how: str = TUNE,
) -> Verdict:
    """Return the verdict on a method by its ``gains`` over local training on test or validation ``rows``; ``scale`` is a number
    of the size of the score, whose digits gains are written with. ``how`` is what to say of settings that were not ``tuned``."""
    size = 1.0 if score.share or scale is None else scale
    by = f"{score.words} on their {rows} rows"
    amount = f"{signed(gains.mean, size)} in {by}"
    outcome = FEW if gains.over is None else HELPS if gains.low > 0 else HURTS if gains.high < 0 else OPEN
    if outcome == FEW:
        side = "better than" if gains.mean > 0 else "worse than" if gains.mean < 0 else "level with"
        sentence = (
            f"{method} is {side} local training on average ({amount}{weighing(gains, size)}), but "
            f"{_count(gains.clients, 'client')} on one split cannot show more than chance; compare with --splits 10, which tests "
            "on other rows of theirs."
        )
    else:
        amount += f" ({interval_words(gains, size)})"
        sentence = {
            HELPS: f"Learning together helps: with {method} the clients' mean gain over local training is {amount}.",
            HURTS: f"Learning together hurts: with {method} the clients' mean gain over local training is {amount}.",
            OPEN: f"Local training may be as good: the mean gain of {method} over it is {amount}, which may be chance.",
        }[outcome]
    known = outcome != FEW
    return Verdict(
        outcome,
        f"{sentence} {how}" if tuned is False else sentence,
        method,
        "local training",
        score.name,
        rows,
        gains.mean,
        gains.low if known else None,
        gains.high if known else None,
        gains.p if known else None,
        gains.clients,
        gains.splits,
        gains.over,
        tuned,
        gains.mean if gains.plain is None else gains.plain,
    )


def judge_newcomer(client: str, gains: Paired, score: Metric, means: tuple[float, float]) -> Verdict:
    """Return the verdict on a client's own model by its ``gains`` over the shared one, row by row (``over_rows``); ``means`` are
    what the two reach on these rows, which neither was trained on."""
    size = 1.0 if score.share else abs(means[0])
    outcome = HELPS if gains.low > 0 else HURTS if gains.high < 0 else OPEN
    begins = {
        HELPS: f"{client}'s own model is better than the shared one",
        HURTS: f"{client}'s own model is worse than the shared one; predict with the shared one until there are more rows",
        OPEN: f"{gains.clients} rows are too few to tell whether {client}'s own model or the shared one is better",
    }[outcome]
    sentence = (
        f"{begins}: {score.words} {plain(means[0], size)} against {plain(means[1], size)} on rows that were not trained on, a "
        f"gain of {signed(gains.mean, size)} ({interval_words(gains, size)})."
    )
    numbers = (gains.mean, gains.low, gains.high, gains.p)
    return Verdict(outcome, sentence, client, "the shared model", score.name, "held-out", *numbers, over=gains.over)


class Candidate(NamedTuple):
    """One of several to choose from: every client's score on its validation rows (NaN: unknown), how many these are, both
    [clients] or [runs, clients], its loss, and of several runs which splits they are of."""

    scores: Numbers
    rows: Numbers
    loss: float
    runs: Runs | None = None

    @property
    def mean(self) -> float | None:
        """The clients' mean score with their weights in a verdict, mean over the runs that know it."""
        runs = zip(np.atleast_2d(self.scores), np.atleast_2d(self.rows), strict=True) if self.scores.size else ()
        known = [mean for scores, rows in runs if (mean := weighted_mean(scores, rows)) is not None]
        return float(np.mean(known)) if known else None


def best_first(candidates: Sequence[Candidate], score: Metric) -> list[int]:
    """Return the places of candidates, the best first: by the clients' weighted mean score; among those that are within a
    standard error of the highest (or lowest, of an error), the loss chooses, which says more on few rows."""

    def rank(place: int) -> tuple[float, float]:
        mean = candidates[place].mean
        return math.inf if mean is None else -float(score.merit(mean)), candidates[place].loss

    order = sorted(range(len(candidates)), key=rank)
    gaps = {place: gains_of(candidates[order[0]], candidates[place], score) for place in order}
    near = [place for place, gap in gaps.items() if gap is not None and gap.errors_ahead <= 1]
    return [*sorted(near, key=lambda place: (candidates[place].loss, rank(place))), *(p for p in order if p not in near)]


def gains_of(ours: Candidate, theirs: Candidate, score: Metric) -> Paired | None:
    """Return by how much one candidate is better than another; None where no client has the score of both."""
    if ours.scores.shape != theirs.scores.shape or not (np.isfinite(ours.scores) & np.isfinite(theirs.scores)).any():
        return None
    return paired(score, ours.scores, theirs.scores, ours.rows, ours.runs)


@dataclass(frozen=True)
class Lead:
    """How far the first of a ranking is ahead of the second, by the test that a verdict goes by: ``outcome`` is "clear", "open"
    (chance may explain it) or "too few clients" (to tell)."""

    rival: str
    outcome: str
    errors_ahead: float
    sentence: str

    def json(self) -> dict[str, Any]:
        """Return the same as plain values; a lead without any scatter has no number of standard errors."""
        return {**asdict(self), "errors_ahead": self.errors_ahead if math.isfinite(self.errors_ahead) else None}


def lead(rival: str, gains: Paired, score: Metric, cure: str = "") -> Lead:
    """Return how far the first is ahead of ``rival``, by its ``gains`` over it; ``cure`` is what would tell more."""
    ahead = gains.errors_ahead
    by = f"by {score.words} ({ahead:.1f} standard errors)" if math.isfinite(ahead) else f"by {score.words}"
    if gains.over is None:
        side = "ahead of" if gains.mean > 0 else "behind" if gains.mean < 0 else "level with"
        few = f"{_count(gains.clients, 'client')} on one split cannot show more than chance"
        return Lead(rival, FEW, ahead, f"It is {side} {rival} by {score.words} on average, but {few}.")
    if gains.low > 0:
        return Lead(rival, CLEAR, ahead, f"It is clearly ahead of {rival} {by}.")
    chose = ", so that the lower loss chose between them" if ahead <= 1 else ""
    return Lead(rival, OPEN, ahead, f"It is not clearly ahead of {rival} {by}{chose}{cure and '; ' + cure}.")


def interval_words(gains: Paired, scale: float | None = None) -> str:
    """Return the interval, what chance it allows for, and how clients count where they do not count alike."""
    noun = "row" if gains.over == "rows" else "client"
    over = f"over {gains.splits} splits" if gains.over == "splits" else f"over {_count(gains.clients, noun)}"
    return f"95 % interval {signed(gains.low, scale)} to {signed(gains.high, scale)}, {over}{weighing(gains, scale)}"


def weighing(gains: Paired, scale: float | None = None) -> str:
    """Return how clients count in a gain, and the plain mean that tables of scores show; nothing where they count alike."""
    if gains.plain is None:
        return ""
    level = signed(gains.plain, scale) == signed(gains.mean, scale)
    return "; clients with few rows count less" + ("" if level else f", the plain mean is {signed(gains.plain, scale)}")


def few_words(gains: Paired) -> str:
    """Return why nothing can be tested."""
    return (
        f"With {_count(gains.clients, 'client')} on one split no test is possible: {FEWEST} clients are needed, or several "
        "splits (--splits 10). The numbers describe these clients and no others."
    )


def plain(value: float, scale: float | None = None) -> str:
    """Return a measure with four decimals, or four digits where it is large or tiny; ``scale`` is the number whose digits it
    follows."""
    size = abs(value if scale is None else scale)
    if abs(value) <= 1e-9 * size:
        value = 0.0
    if 1e-3 <= size < 1e6 or value == 0:
        words = f"{value:,.{4 if size < 10 else max(0, 3 - math.floor(math.log10(size)))}f}"
        return words if value == 0 or words.strip("-0.") else f"{value:.2g}"
    return f"{value:.4g}"


def signed(value: float, scale: float | None = None) -> str:
    level = abs(value) <= 1e-9 * abs(value if scale is None else scale)  # plain writes 0
    return ("" if level else "+" if value > 0 else "\u2212") + plain(abs(value), scale)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
