"""Runs as one self-contained HTML page: words first, then the table, then pictures, then how it was done."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fedtailor.algorithms.settings import written
from fedtailor.metrics.verdict import plain
from fedtailor.report import diagnostics, figures, privacy, provenance
from fedtailor.report.evidence import Evidence, Results, number
from fedtailor.report.explained import part
from fedtailor.report.figures import Line
from fedtailor.report.pieces import document, figure, listed, section, table
from fedtailor.report.words import datasets, p_words, story
from fedtailor.runs import files
from fedtailor.runs.record import Record
from fedtailor.task.scores import score_named

NAMED = 7  # curves drawn in colour where there are more than MOST methods
MOST = len(figures.COLORS)
POINTS = 200  # of a curve
UNVARIED = ("trained_parameters", "bytes_up", "bytes_down", "seconds", "tuning_seconds")  # shown without a deviation
SIDES = {"personal": "personal", "global": "shared"}  # of a measure

settings_of = written


def headline(results: Results) -> dict[str, Any]:
    """Return which method is best on validation, and its summary over seeds; without validation rows, the best of several is
    None."""
    evidence = Evidence(results)
    judged = evidence.judged_by if evidence.best in evidence.validation else None
    summary = {} if evidence.best is None else averaged(evidence.results[evidence.best])
    return {**summary, "best": evidence.best, "chosen_by": judged}


def averaged(records: Sequence[Record]) -> dict[str, Any]:
    """Return the summary over seeds: means of measures, and what is the same in all of them; None where a seed has no number."""
    out: dict[str, Any] = {}
    for key in dict.fromkeys(key for record in records for key in record.summary):
        values = [record.summary.get(key) for record in records]
        numbers = [number(value) for value in values]
        if all(value == values[0] for value in values):
            out[key] = values[0]
        elif key != "seed":
            out[key] = None if None in numbers else float(np.mean([n for n in numbers if n is not None]))
    return out


def columns(name: str, summaries: Iterable[Mapping[str, Any]] = ()) -> dict[str, str]:
    """Summary keys shown, and what they are called; measures of the user's own, corrupted rows and the privacy spent where one of
    the summaries has them."""
    long, summaries = score_named(name).title, list(summaries)
    named = [summary["own_measures"] for summary in summaries if isinstance(summary.get("own_measures"), list)]
    own = dict.fromkeys(str(other) for names in named for other in names if other != name)
    optional = (
        f"{name}_shifted_test",
        "threshold",
        "epsilon_max",
        "epsilon_composed",
        "user_epsilon",
        "user_epsilon_composed",
        "tuning_seconds",
    )
    present = {key for summary in summaries for key in optional if number(summary.get(key)) is not None}
    every = {
        f"{name}_personal": f"personal {long}",
        f"{name}_global": f"shared {long}",
        **{f"{other}_{side}": f"{word} {score_named(other).title}" for other in own for side, word in SIDES.items()},
        f"{name}_global_test": "on all rows",
        f"{name}_shifted_test": "on corrupted rows",
        "share_benefit": "benefit",
        "worst_decile": "worst 10%",
        "threshold": "threshold",
        "epsilon_max": "epsilon",
        "epsilon_composed": "all runs' epsilon",
        "user_epsilon": "client's epsilon",
        "user_epsilon_composed": "all runs' client's epsilon",
        "bytes_up": "MB up",
        "bytes_down": "MB down",
        "trained_parameters": "trained",
        "seconds": "time (s)",
        "tuning_seconds": "tuning (s)",
    }
    return {key: title for key, title in every.items() if key not in optional or key in present}


def cell(key: str, value: Any, scale: float | None = None) -> str:
    """Return a summary's value as the table shows it; a deviation is given its mean as ``scale``, whose digits it follows."""
    known = number(value)
    if known is None:
        return "-"
    if key in ("bytes_up", "bytes_down"):
        return f"{known / 1e6:,.2f}"
    if key == "share_benefit":
        return f"{100 * known:.0f} %"
    if key in ("seconds", "tuning_seconds"):
        return f"{known:,.1f}"
    return f"{known:,.0f}" if key == "trained_parameters" or isinstance(value, int) else plain(known, scale)


def page(
    results: Results,
    *,
    command: str | None = None,
    notes: Sequence[str] = (),
    failed: Mapping[str, str] | None = None,
    yardsticks: Results | None = None,
    explained: tuple[dict[str, Any] | None, list[str]] = (None, []),
) -> str:
    """Return the report of methods by label, with a record per split and seed; ``command`` is what made it, ``notes`` what else
    to know.

    ``failed`` says of methods that could not be measured why, ``yardsticks`` are what the methods are held against,
    ``explained`` is what ``engine.explain`` says of the models, and its words.
    """
    evidence = Evidence(results, failed or {}, yardsticks or {})
    sections = [
        section("", *(f"<p>{paragraph}</p>" for paragraph in story(evidence))),
        section("The methods", _methods(evidence)),
        section("Where the line between two classes is drawn", _thresholds(evidence)),
        section("Round by round, and for the traffic", _curves(evidence)),
        section("Client by client", _dots(evidence), _gains(evidence)),
        section("New clients", _newcomers(evidence)),
        *part(*explained),
        section("Which rows each model gets right", _shares(evidence)),
        *(section(title, *parts) for title, parts in diagnostics.sections(evidence)),
        section("Privacy", *_privacy(results)),
        section("Tuning", *provenance.tuning(evidence)),
        section("The data", listed(dict.fromkeys([*(note for r in evidence.records for note in r.notes), *notes]))),
        section("Settings", provenance.settings(evidence), provenance.options(evidence)),
        section("How to reproduce it", provenance.reproduce(evidence, command)),
        section("What the columns mean", provenance.meanings()),
    ]
    title = f"fedtailor: {', '.join(datasets(evidence))}"
    return document(title, f"<h1>Who gains by learning together?</h1>{''.join(sections)}")


def _privacy(results: Results) -> list[str]:
    """Return what private runs protect, and what is not counted; nothing where none is private."""
    summaries = {label: privacy.worst_of([record.summary for record in records]) for label, records in results.items()}
    protected = privacy.story(summaries)
    missing = privacy.not_counted(list(summaries.values()))
    uncounted = [f"<p>Not counted:</p>{listed(missing)}"] if missing else []
    return [listed(protected), *uncounted] if protected else []


def write(results: Results, path: str | os.PathLike[str], **options: Any) -> Path:
    """Write the page (``options`` are those of ``page``); the file is replaced whole or not at all."""
    target = Path(path)
    files.write(target, page(results, **options))
    return target


# -- the parts, in the order of the page; each is empty where there is nothing to show -----------------------------------
def _methods(evidence: Evidence) -> str:
    shown = columns(evidence.name, (r.summary for records in evidence.results.values() for r in records))
    judged = evidence.judged_by
    keys = {**({judged: "validation"} if evidence.validation else {}), **shown}
    rows = []
    for label in evidence.order:
        p = evidence.p_values.get(label)
        cells = [_measured(evidence, label, key) for key in keys] + (
            [p_words(p) if p is not None else "-"] if evidence.p_values else []
        )
        row = "".join(f"<td>{content}</td>" for content in (escape(label), *cells))
        rows.append(f"<tr{' class=best' if label == evidence.best and len(evidence.results) > 1 else ''}>{row}</tr>")
    titles = ["method", *keys.values(), *(["p"] if evidence.p_values else [])]
    for label in evidence.yardsticks:
        cells = [_measured(evidence, label, key) for key in keys] + (["-"] if evidence.p_values else [])
        row = "".join(f"<td>{content}</td>" for content in (f"<i>{escape(label)} (yardstick)</i>", *cells))
        rows.append(f"<tr>{row}</tr>")
    for label, reason in evidence.failed.items():
        rows.append(f'<tr><td>{escape(label)}</td><td colspan="{len(titles) - 1}">failed: {escape(reason)}</td></tr>')
    listing = {label: records[0].settings for label, records in evidence.yardsticks.items()}
    yardsticks = f"<p>Yardsticks: {'; '.join(f'{escape(k)}: {escape(v)}' for k, v in listing.items())}.</p>" if listing else ""
    return table(titles, rows, "wide") + yardsticks


def _thresholds(evidence: Evidence) -> str:
    """Return what the threshold of each method gives on all test rows, where one was chosen."""
    measures = {label: at for label in evidence.order if (at := evidence.at_threshold(label))}
    if not measures:
        return ""
    titles = list(next(iter(measures.values())))
    rows = [
        f"<tr><td>{escape(label)}</td>{''.join(f'<td>{cell(key, at.get(key))}</td>' for key in titles)}</tr>"
        for label, at in measures.items()
    ]
    about = "On the test rows of all clients, each predicted by its client's model; the threshold is chosen on validation rows."
    return table(["method", *(title.replace("_", " ") for title in titles)], rows) + f"<p>{about}</p>"


def terminal_rows(evidence: Evidence) -> list[dict[str, str]]:
    """Return the table of the methods as a terminal shows it: the best on validation first, yardsticks in brackets, failures
    last."""
    shown = columns(evidence.name, (record.summary for record in evidence.records))
    rows = []
    for label in (*evidence.order, *evidence.yardsticks):
        plus = {f"{evidence.name}_personal": " ± {}"}  # the deviation, where there is room for one
        cells = {title: _measured(evidence, label, key, plus.get(key, "")) for key, title in shown.items()}
        rows.append({"method": label if label in evidence.results else f"({label})", **cells})
    return [*rows, *({"method": label, **dict.fromkeys(shown.values(), "-")} for label in evidence.failed)]


def _measured(evidence: Evidence, label: str, key: str, more: str = "<small>± {}</small>") -> str:
    average = evidence.average(label, key)
    if average is None:
        return "-"
    key = key.removeprefix("new_")
    deviation = average.deviation if key not in UNVARIED else None
    return cell(key, average.mean) + ("" if deviation is None else more.format(cell(key, deviation, average.mean)))


def _curves(evidence: Evidence) -> str:
    paths = {label: _path(evidence, label) for label in evidence.order}
    farthest = max((mb for path in paths.values() for _, mb, _ in path), default=0.0)
    named = _named(evidence)
    lines = []
    silent = []
    for label in [*named, *(label for label in evidence.order if label not in named)]:
        path = paths[label]
        panels = [[(rnd, value) for rnd, _, value in path]]
        if farthest > 0:
            sends = bool(path) and path[-1][1] > 0
            if path and not sends:
                silent.append(label)
            level = [(0.0, path[-1][2]), (farthest, path[-1][2])] if path else []
            panels.append([(mb, value) for _, mb, value in path] if sends else level)
        lines.append(Line(label, panels, label in named))
    title = columns(evidence.name)[f"{evidence.name}_personal"]
    across = ["rounds", "megabytes, down and up"] if farthest > 0 else ["rounds"]
    picture = figures.curves(lines, across, title, log=not evidence.score.share)
    text = f"Personal models on the clients' own test rows{_over_seeds(evidence)}."
    if silent:
        text += f" {', '.join(silent)}: nothing is sent, so the right side shows the last value as a level."
    return figure(picture, text)


def _named(evidence: Evidence) -> list[str]:
    """Methods drawn in colour: all if they are few, else the best, Local and FedAvg."""
    if len(evidence.results) <= MOST:
        return evidence.order
    always = [label for label in (evidence.subject, evidence.local, evidence.together) if label is not None]
    chosen = list(dict.fromkeys([*always, *evidence.order]))[:NAMED]
    return [label for label in evidence.order if label in chosen]


def _path(evidence: Evidence, label: str) -> list[tuple[float, float, float]]:
    """Return (round, megabytes so far, measure) at the rounds that every seed evaluated, mean over seeds."""
    by_round: dict[int, list[tuple[float, float]]] = {}
    records = evidence.results[label]
    for record in records:
        sent = 0.0
        for line in record.rounds:
            sent += (number(line.get("bytes_down")) or 0.0) + (number(line.get("bytes_up")) or 0.0)
            value = number(line.get(f"{evidence.name}_personal"))
            if value is not None:
                by_round.setdefault(int(line["round"]) + 1, []).append((sent / 1e6, value))
    path = [(float(rnd), *map(float, np.mean(at, axis=0))) for rnd, at in sorted(by_round.items()) if len(at) == len(records)]
    every = -(-len(path) // POINTS)
    return [(rnd, mb, value) for rnd, mb, value in path[:: -every or -1]][::-1]


def _dots(evidence: Evidence) -> str:
    name, subject, score = evidence.name, evidence.subject, evidence.score
    series = {
        "shared": evidence.per_client(subject, f"{name}_global"),
        "personal": evidence.per_client(subject, f"{name}_personal"),
    }
    if evidence.local not in (None, subject):
        series = {figures.LOCAL: evidence.per_client(str(evidence.local), f"{name}_personal"), **series}
    picture = figures.dots(evidence.clients, series, score.words, best_low=not score.higher, log=not score.share)
    unknown = int((~np.isfinite(series["personal"])).sum())
    text = f"{subject}: each client's test {score.words}{_over_seeds(evidence)}, of its personal model"
    text += " and of the shared model" if np.isfinite(series["shared"]).any() else ""
    text += ", beside local training." if figures.LOCAL in series else "."
    if len(evidence.clients) - unknown > figures.ROWS:
        text += " The line spans 90 % of the clients, the box half of them, the bar is the median."
    if unknown:
        text += f" Not measured, and left out: {unknown:,} of {len(evidence.clients):,} clients."
    return figure(picture, text)


def _gains(evidence: Evidence) -> str:
    comparisons = {"over its shared model": evidence.own_gain, "over Local": evidence.against_local}
    panels = {title: gain.differences.tolist() for title, gain in comparisons.items() if gain is not None}
    picture = figures.gains(evidence.clients, panels, "gain")
    text = f"{evidence.subject}: what each client gains by its personal model (filled) or loses (hollow)."
    if any(len(panel) > figures.BARS for panel in panels.values()):
        text += f" Of the sorted clients, {figures.BARS} evenly spaced ones are drawn."
    return figure(picture, text)


def _newcomers(evidence: Evidence) -> str:
    name = evidence.name
    shown = {f"new_{key}": title for key, title in columns(name).items()}
    keys = {key: title for key, title in shown.items() if any(key in record.summary for record in evidence.records)}
    labels = [label for label in evidence.order if any(evidence.average(label, key) for key in keys)]
    if not labels:
        return ""
    rows = []
    for label in labels:
        count = evidence.average(label, "new_clients")
        cells = [escape(label), "-" if count is None else f"{count.mean:g}", *(_measured(evidence, label, key) for key in keys)]
        rows.append(f"<tr>{''.join(f'<td>{content}</td>' for content in cells)}</tr>")
    text = "Clients that were held out of training: they meet the final model, do one round of local work, and send nothing back."
    return f"<p>{text}</p>{table(['method', 'new clients', *keys.values()], rows)}"


def _shares(evidence: Evidence) -> str:
    rows = {}
    for label in evidence.order:
        parts = [evidence.average(label, key) for key in ("both_correct", "personal_only", "global_only")]
        known = [part.mean for part in parts if part is not None]
        if len(known) == len(parts):
            rows[label] = [*known, max(0.0, 1 - sum(known))]
    text = (
        "Test rows of all clients together, by which of a method's two models gets them right: the client's own, the shared one."
    )
    return figure(figures.shares(rows), text)


def _over_seeds(evidence: Evidence) -> str:
    counts = {"split": len(evidence.splits), "seed": len(evidence.seeds)}
    parts = [f"{count} {noun}s" for noun, count in counts.items() if count > 1]
    return f" (mean over {' and '.join(parts)})" if parts else ""
