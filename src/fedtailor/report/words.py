"""The report in words: whom learning together helps and hurts, by how much, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from fedtailor.metrics.paired import FEWEST, Paired
from fedtailor.report.evidence import Average, Evidence

NAMED = 5  # clients or methods listed by name, at most


def story(evidence: Evidence) -> list[str]:
    """The paragraphs above the table, as HTML: the advice first."""
    paragraphs = [
        f"<strong>{advice(evidence)}</strong>",
        f"{_scope(evidence)} {_choice(evidence)}",
        _comparison(evidence, evidence.against_local, _strong(evidence.local or "")),
        _comparison(evidence, evidence.against_shared, _shared_rival(evidence)),
        " ".join(caveats(evidence)),
    ]
    return [paragraph for paragraph in paragraphs if paragraph]


def advice(evidence: Evidence) -> str:
    """One sentence: learn together or not, as far as the interval of the mean gain tells."""
    subject, gains = _strong(evidence.subject), evidence.against_local
    if evidence.yardstick(evidence.subject) == "alone":
        return "Only local training was run: add a method that learns together, such as FedAvg or Ditto, to see whether it helps."
    if gains is None:
        missing = f"and {subject} measured no client in common" if evidence.local else "is not among the methods"
        start = f"Whether learning together helps is not known: Local {missing}"
        return f"{start}. {_personalizing(evidence)}" if evidence.against_shared else f"{start}."
    if gains.clients < FEWEST:
        side = "better than" if gains.mean > 0 else "worse than" if gains.mean < 0 else "level with"
        return (
            f"{subject} is {side} local training on average, but {_count(gains.clients, 'client')} cannot show more than chance."
        )
    if gains.low > 0:
        return f"Learning together helps: with {subject} the clients' mean gain over local training is {_gain(evidence, gains)}."
    if gains.high < 0:
        return f"Learning together hurts: with {subject} the clients' mean gain over local training is {_gain(evidence, gains)}."
    return f"Local training may be as good: {subject} gains {_gain(evidence, gains)} over it on average, which may be chance."


def _personalizing(evidence: Evidence) -> str:
    gains, subject, rival = evidence.against_shared, _strong(evidence.subject), _shared_rival(evidence)
    assert gains is not None
    if gains.clients < FEWEST:
        return f"{_count(gains.clients, 'client').capitalize()} cannot show more than chance about personalising either."
    if gains.low > 0:
        return f"Personalising helps: {subject}'s mean gain over {rival} is {_gain(evidence, gains)}."
    if gains.high < 0:
        return f"Personalising hurts: {subject}'s mean gain over {rival} is {_gain(evidence, gains)}."
    return f"One shared model may be as good: {subject} gains {_gain(evidence, gains)} over {rival}, which may be chance."


def _scope(evidence: Evidence) -> str:
    """Say which methods were run, and on which data."""
    summaries = [record.summary for record in evidence.records]
    rounds = list(dict.fromkeys(str(summary.get("rounds", "?")) for summary in summaries))
    where = ", ".join(escape(str(name)) for name in datasets(evidence))
    length = f"{_list(rounds)} round{'' if rounds == ['1'] else 's'}"
    return (
        f"{_count(len(evidence.results), 'method')} on {where}: {_count(len(evidence.clients), 'client')}, {length}, "
        f"{'seed' if len(evidence.seeds) == 1 else 'seeds'} {_list([str(seed) for seed in evidence.seeds], 10)}."
    )


def _choice(evidence: Evidence) -> str:
    """Which method is the best, by what, and what it reaches on test."""
    best, key = evidence.best, f"{evidence.name}_personal"
    if best is None:
        return (
            "There are no validation rows, so no method is called the best: choosing by the test rows would flatter the choice. "
            f"The words and pictures are about {_strong(evidence.subject)}, the first listed. Keep a validation split to choose."
        )
    reached = evidence.average(best, key)
    value = "unknown" if reached is None else spread(reached)
    test = f"{evidence.score.with_article} of {value} on the clients' own test rows"
    if len(evidence.results) == 1:
        return f"The personal models of {_strong(best)} reach {test}."
    left_out = [label for label in evidence.results if label not in evidence.validation]
    rest = f" Without a score on validation, and so left out of the choice: {_list(left_out)}." if left_out else ""
    about = ""
    if best != evidence.subject:
        about = f" The best method that learns together is {_strong(evidence.subject)}; words and pictures below are about it."
    return f"Best on validation is {_strong(best)}: its personal models reach {test}.{rest}{about}"


def _comparison(evidence: Evidence, gains: Paired | None, rival: str) -> str:
    """Who gains and who loses against a rival, how sure that is, and the clients that lose most."""
    if gains is None:
        return ""
    differences, scale = gains.differences, _scale(evidence)
    gain, lose, level = (int(np.sum(side)) for side in (differences > 0, differences < 0, differences == 0))
    words = [
        f"Against {rival}, {gain:,} of {_count(gains.clients, 'client')} gain by {_strong(evidence.subject)}, "
        f"{_some(lose)} {'lose' if lose > 1 else 'loses'} and {_some(level)} {'are' if level > 1 else 'is'} level."
    ]
    tested = f", p {'' if gains.p < 0.001 else '= '}{p_words(gains.p)} (Wilcoxon's signed-rank test)"
    sure = tested if gains.clients >= FEWEST else ""
    words.append(f"The mean gain is {_gain(evidence, gains) if sure else signed(gains.mean, scale)}{sure}.")
    losers = [i for i in np.argsort(differences, kind="stable")[:NAMED] if differences[i] < 0]  # NaN comes last
    if losers:
        named = ", ".join(f"{escape(evidence.clients[i])} ({signed(float(differences[i]), scale)})" for i in losers)
        words.append(f"{'It loses' if lose == 1 else 'Those who lose most' if lose > NAMED else 'Those who lose'}: {named}.")
    return " ".join(words)


def _shared_rival(evidence: Evidence) -> str:
    if evidence.sharer == evidence.subject:
        return "its own shared model"
    return f"the one shared model of {_strong(evidence.sharer or '')}"


def caveats(evidence: Evidence) -> list[str]:
    """What a reader should know before believing the numbers."""
    out = []
    if evidence.failed:
        reasons = "; ".join(f"{_strong(label)} ({escape(reason)})" for label, reason in evidence.failed.items())
        out.append(f"Failed, and so neither measured nor compared: {reasons}.")
    if not evidence.score.higher:
        out.append(f"A gain is a {evidence.score.improvement}.")
    rivals = [gains.clients for gains in (evidence.against_local, evidence.against_shared) if gains is not None]
    fewest = min(rivals, default=FEWEST)
    if fewest < FEWEST:
        floor = min(1.0, 2 / 2**fewest)
        out.append(
            f"With {_count(fewest, 'client')} no test is possible: even if all of them gained, p would be {floor:.2g}. "
            "The numbers describe these clients and no others."
        )
    if len(evidence.seeds) == 1:
        out.append("There is one seed, so how much the numbers owe to chance in training is not known.")
    alike = [label for label, p in evidence.p_values.items() if p >= 0.05]
    if alike and evidence.best is not None:
        out.append(f"Corrected for the number of methods, the test does not tell {_strong(evidence.best)} from {_list(alike)}.")
    if len(datasets(evidence)) > 1:
        out.append("The runs are on different data: comparing them means little.")
    if evidence.unequal_rows:
        out.append(
            "Some clients were tested on different rows by different methods; they are left out where methods are compared."
        )
    lengths = {record.summary.get("rounds") for record in evidence.records}
    if len(lengths) > 1:
        out.append("The runs are of different lengths.")
    return out


def datasets(evidence: Evidence) -> list[str]:
    return list(dict.fromkeys(str(record.summary.get("dataset", "unnamed data")) for record in evidence.records))


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


def spread(average: Average) -> str:
    return plain(average.mean) + ("" if average.deviation is None else f" ± {plain(average.deviation, average.mean)}")


def p_words(p: float) -> str:
    return "&lt; 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _scale(evidence: Evidence) -> float:
    """A number of the size of the measure: gains are written with its digits."""
    reached = evidence.average(evidence.subject, f"{evidence.name}_personal")
    return 1.0 if evidence.score.share or reached is None else reached.mean


def _gain(evidence: Evidence, gains: Paired) -> str:
    mean, low, high = (signed(value, _scale(evidence)) for value in (gains.mean, gains.low, gains.high))
    return f"{mean} (95 % interval {low} to {high})"


def _strong(label: str) -> str:
    return f"<b>{escape(label)}</b>"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _some(number: int) -> str:
    return f"{number:,}" if number else "none"


def _list(words: Sequence[str], most: int = NAMED) -> str:
    shown = ", ".join(escape(word) for word in words[:most])
    return shown + (f" and {len(words) - most} more" if len(words) > most else "")
