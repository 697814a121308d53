"""The report in words: whom learning together helps and hurts, by how much, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from fedtailor.data.words import shown
from fedtailor.metrics.paired import Paired
from fedtailor.metrics.verdict import UNKNOWN, few_words, interval_words, plain, signed, weighing
from fedtailor.report.evidence import Average, Evidence

GUESSES = ("majority class", "mean", "majority labels")  # yardsticks that look at no feature
NAMED = 5  # clients or methods listed by name, at most


def story(evidence: Evidence) -> list[str]:
    """Return the paragraphs above the table, as HTML: the advice first."""
    paragraphs = [
        f"<strong>{advice(evidence)}</strong>",
        f"{_scope(evidence)} {_choice(evidence)}",
        escape(held_against(evidence)),
        _comparison(evidence, evidence.against_local, _strong(evidence.local or "")),
        _comparison(evidence, evidence.against_shared, _shared_rival(evidence)),
        " ".join(caveats(evidence)),
    ]
    return [paragraph for paragraph in paragraphs if paragraph]


def advice(evidence: Evidence) -> str:
    """Return the verdict; where local training was not run, with what can be said about personalising."""
    said = escape(evidence.verdict.sentence)
    return f"{said} {_personalizing(evidence)}" if evidence.verdict.outcome == UNKNOWN and evidence.against_shared else said


def _personalizing(evidence: Evidence) -> str:
    gains, subject, rival = evidence.against_shared, _strong(evidence.subject), _shared_rival(evidence)
    assert gains is not None
    if gains.over is None:
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
    again = f", {len(evidence.splits)} splits of the rows of every client" if len(evidence.splits) > 1 else ""
    length = f"{_list(rounds)} round{'' if rounds == ['1'] else 's'}"
    return (
        f"{_count(len(evidence.results), 'method')} on {where}: {_count(len(evidence.clients), 'client')}, {length}, "
        f"{'seed' if len(evidence.seeds) == 1 else 'seeds'} {_list([str(seed) for seed in evidence.seeds], 10)}"
        f"{again}."
    )


def _choice(evidence: Evidence) -> str:
    """Return which method is the best, by what, and what it reaches on test."""
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
    return f"Best on validation is {_strong(best)}{escape(_near(evidence))}: its personal models reach {test}.{rest}{about}"


def _near(evidence: Evidence) -> str:
    """Return why the best is not the one with the best mean on validation, where it is not."""
    if evidence.highest in (None, evidence.best):
        return ""
    return f" (its score is within a standard error of that of {evidence.highest}, and its loss is lower)"


def chosen(evidence: Evidence) -> str:
    """Say which method is best on validation, and which the test does not tell from it, as plain text."""
    if evidence.best is None:
        return "There are no validation rows to choose a method on."
    alike = f"; the test does not tell it from {', '.join(evidence.alike)}" if evidence.alike else ""
    untuned = ", none of them tuned" if len(evidence.results) > 1 and not evidence.tuned else ""
    return f"Best on validation{untuned}: {evidence.best}{_near(evidence)}{alike}."


def held_against(evidence: Evidence) -> str:
    """Say what the yardsticks reach, and that they are no methods; nothing where there are none."""
    reached = {label: evidence.average(label, f"{evidence.name}_personal") for label in evidence.yardsticks}
    known = {label: average.mean for label, average in reached.items() if average is not None}
    if not known:
        return ""
    each = ", ".join(f"{label} {plain(value)}" for label, value in known.items())
    said = f"Yardsticks, no methods to choose from ({evidence.score.words}): {each}."
    best = None if evidence.best is None else evidence.average(evidence.best, f"{evidence.name}_personal")
    guess = next(((label, value) for label, value in known.items() if label in GUESSES), None)
    if best is not None and guess is not None and evidence.score.gain(best.mean, guess[1]) <= 0:
        said += f" {evidence.best} is no better than the {guess[0]} of each client's training rows."
    return said


def _comparison(evidence: Evidence, gains: Paired | None, rival: str) -> str:
    """Return who gains and who loses against a rival, how sure that is, and the clients that lose most."""
    if gains is None:
        return ""
    differences, scale = gains.differences, evidence.scale
    gain, lose, level = (int(np.sum(side)) for side in (differences > 0, differences < 0, differences == 0))
    words = [
        f"Against {rival}, {gain:,} of {_count(gains.clients, 'client')} gain by {_strong(evidence.subject)}, "
        f"{_some(lose)} {'lose' if lose > 1 else 'loses'} and {_some(level)} {'are' if level > 1 else 'is'} level."
    ]
    tested = f", p {'' if gains.p < 0.001 else '= '}{p_words(gains.p)}"
    sure = tested if gains.over is not None else ""
    untested = f"{signed(gains.mean, scale)}{weighing(gains, scale)}"
    words.append(f"The mean gain is {_gain(evidence, gains) if sure else untested}{sure}.")
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
    """Return what a reader should know before believing the numbers."""
    out = []
    if evidence.failed:
        reasons = "; ".join(f"{_strong(label)} ({escape(reason)})" for label, reason in evidence.failed.items())
        out.append(f"Failed, and so neither measured nor compared: {reasons}.")
    if not evidence.score.higher:
        out.append(f"A gain is a {evidence.score.improvement}.")
    rivals = [gains for gains in (evidence.against_local, evidence.against_shared) if gains is not None]
    if untested := [gains for gains in rivals if gains.over is None]:
        out.append(few_words(min(untested, key=lambda gains: gains.clients)))
    if len(evidence.splits) == 1:
        again = "one seed and one split" if len(evidence.seeds) == 1 else "one split"
        out.append(f"There is {again} of the rows, so how much the numbers owe to which rows test is not known (--splits 10).")
    if evidence.alike and evidence.best is not None:
        best = _strong(evidence.best)
        out.append(f"The test, corrected for the number of methods, does not tell {best} from {_list(evidence.alike)}.")
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


def threshold_words(evidence: Evidence) -> str:
    """Where the line between two classes is drawn by the best method (or the only one), and what it gives, if it is."""
    label = evidence.best or evidence.subject
    at = evidence.at_threshold(label)
    if not at:
        return ""
    measures = ("f1", "balanced_accuracy", "sensitivity", "specificity")
    gives = ", ".join(f"{key.replace('_', ' ')} {plain(value)}" for key in measures if (value := at.get(key)) is not None)
    name = evidence.results[label][0].summary.get("at_threshold", {}).get("class")
    said = "The second class" if name is None else f"The class {shown(name)}"
    return (
        f"{said} is said from probability {plain(at['threshold'] or 0.0)} on ({label}; chosen on validation rows): on all test "
        f"rows {gives}."
    )


def datasets(evidence: Evidence) -> list[str]:
    return list(dict.fromkeys(str(record.summary.get("dataset", "unnamed data")) for record in evidence.records))


def spread(average: Average) -> str:
    return plain(average.mean) + ("" if average.deviation is None else f" ± {plain(average.deviation, average.mean)}")


def p_words(p: float) -> str:
    return "&lt; 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _gain(evidence: Evidence, gains: Paired) -> str:
    return f"{signed(gains.mean, evidence.scale)} ({interval_words(gains, evidence.scale)})"


def _strong(label: str) -> str:
    return f"<b>{escape(label)}</b>"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _some(number: int) -> str:
    return f"{number:,}" if number else "none"


def _list(words: Sequence[str], most: int = NAMED) -> str:
    shown = ", ".join(escape(word) for word in words[:most])
    return shown + (f" and {len(words) - most} more" if len(words) > most else "")
