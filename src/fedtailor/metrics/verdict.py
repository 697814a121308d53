"""The verdict: does learning together help, in one sentence. Terminal, pages and json all take it from here."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fedtailor.metrics.paired import FEWEST, Paired
from fedtailor.task.scores import Metric

HELPS, HURTS, OPEN, FEW, UNKNOWN = "helps", "hurts", "open", "too few clients", "not known"
TUNE = "Settings were not tuned (defaults where none were given); --tune chooses them on validation rows."


@dataclass(frozen=True)
class Verdict:
    """Whether ``method`` is better than ``rival`` (local training) by one score and one test; ``sentence`` says it all.

    ``outcome`` is "helps", "hurts", "open" (chance may explain it), "too few clients" (to tell) or "not known" (no rival was
    run). ``gain`` is the clients' weighted mean, positive where ``method`` is better, with its 95 % interval; ``over`` says
    whether chance was seen in clients or in splits; ``tuned`` is None where that is no question.
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

    def json(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return asdict(self)


def unknown(method: str, score: Metric, why: str, tuned: bool | None = None) -> Verdict:
    """Return that it is not known, and why."""
    return Verdict(UNKNOWN, why, method, score=score.name, tuned=tuned)


def judge(
    method: str, gains: Paired, score: Metric, *, scale: float | None = None, rows: str = "test", tuned: bool | None = None
) -> Verdict:
    """Return the verdict on a method by its ``gains`` over local training on test or validation ``rows``; ``scale`` is a number
    of the size of the score, whose digits gains are written with."""
    size = 1.0 if score.share or scale is None else scale
    by = f"{score.words} on their {rows} rows"
    amount = f"{signed(gains.mean, size)} in {by}"
    outcome = FEW if gains.over is None else HELPS if gains.low > 0 else HURTS if gains.high < 0 else OPEN
    if outcome == FEW:
        side = "better than" if gains.mean > 0 else "worse than" if gains.mean < 0 else "level with"
        sentence = (
            f"{method} is {side} local training on average ({amount}), but {_count(gains.clients, 'client')} on one split "
            "cannot show more than chance; compare with --splits 10, which tests on other rows of theirs."
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
        f"{sentence} {TUNE}" if tuned is False else sentence,
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
    )


def interval_words(gains: Paired, scale: float | None = None) -> str:
    """Return the interval, and what chance it allows for."""
    over = f"over {gains.splits} splits" if gains.over == "splits" else f"over {_count(gains.clients, 'client')}"
    return f"95 % interval {signed(gains.low, scale)} to {signed(gains.high, scale)}, {over}"


def few_words(gains: Paired) -> str:
    """Return why nothing can be tested."""
    return (
        f"With {_count(gains.clients, 'client')} on one split no test is possible: {FEWEST} clients are needed, or several "
        "splits (--splits 10). The numbers describe these clients and no others."
    )


def plain(value: float, scale: float | None = None) -> str:
    """A measure with four decimals, or four digits where it is large or tiny; ``scale`` is the number whose digits it follows."""
    size = abs(value if scale is None else scale)
    if abs(value) <= 1e-9 * size:
        value = 0.0
    if 1e-3 <= size < 1e6 or value == 0:
        words = f"{value:,.{4 if size < 10 else max(0, 3 - math.floor(math.log10(size)))}f}"
        return words if value == 0 or words.strip("-0.") else f"{value:.2g}"
    return f"{value:.4g}"


def signed(value: float, scale: float | None = None) -> str:
    return ("+" if value > 0 else "\u2212" if value < 0 else "") + plain(abs(value), scale)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
