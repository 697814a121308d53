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
from fedtailor.report import diagnostics, figures, privacy
from fedtailor.report.evidence import Evidence, Results, number
from fedtailor.report.figures import Line
from fedtailor.report.pieces import document, figure, listed, section, table
from fedtailor.report.words import datasets, p_words, story
from fedtailor.runs import files
from fedtailor.runs.record import Record
from fedtailor.task.scores import score_named
from fedtailor.version import __version__

NAMED = 7  # curves drawn in colour where there are more than MOST methods
MOST = len(figures.COLORS)
POINTS = 200  # of a curve
UNVARIED = ("trained_parameters", "bytes_up", "bytes_down", "seconds", "tuning_seconds")  # shown without a deviation
TRIALS = 100  # settings tried that are listed

settings_of = written

MEANINGS = {
    "validation": "mean over clients on their validation rows, of the personal model, clients with few rows counting less; it "
    "orders the table and chooses the best",
    "personal": "mean over clients of the personal model on the client's own test rows",
    "shared": "mean over clients of the shared model, with no local step, on the client's own test rows",
    "on all rows": "personal models on the union of the clients' test rows: how general they still are",
    "on corrupted rows": "the same on corrupted pictures (--shift), mean over the corruptions",
    "benefit": "share of clients whose personal model is strictly better than the shared one",
    "worst 10%": "mean of the personal models over the worst tenth of the clients",
    "MB up, MB down": "megabytes sent by and to the clients in all rounds, as they are serialised",
    "trained": "numbers a client trains in a round",
    "epsilon": "privacy spent by the client that spends most: how far a training row can change what it sends and predicts with",
    "all runs' epsilon": "the client that spends most, over all runs and trials that looked at the same rows",
    "client's epsilon": "how far a whole client, with all its rows, can change the shared model",
    "time (s)": "seconds from start to end on the machine that ran it",
    "tuning (s)": "seconds that choosing the settings took, before the runs whose time is shown",
    "p": "two-sided p-value of the test that the interval belongs to, best method against this one; Holm's correction",
    "±": "standard deviation over splits of the rows, or over seeds where there is one split",
    "mean gain": "over clients, paired on the same rows; clients count alike from the median number of test rows on, those with "
    "fewer in proportion, so that one row does not weigh like hundreds",
    "95 % interval": "of the mean gain, by Student's law: over clients, or over splits of the rows where these leave more room "
    "or clients are fewer than six; splits of the same rows overlap, and their variance is corrected for it (Nadeau and Bengio "
    "2003)",
}


def headline(results: Results) -> dict[str, Any]:
    """Which method is best on validation, and its summary over seeds; without validation rows, the best of several is None."""
    evidence = Evidence(results)
    judged = evidence.judged_by if evidence.best in evidence.validation else None
    summary = {} if evidence.best is None else averaged(evidence.results[evidence.best])
    return {**summary, "best": evidence.best, "chosen_by": judged}


def averaged(records: Sequence[Record]) -> dict[str, Any]:
    """The summary over seeds: means of measures, and what is the same in all of them; None where a seed has no number."""
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
    """Summary keys shown, and what they are called; corrupted rows and the privacy spent where one of the summaries has them."""
    long = score_named(name).title
    optional = (
        f"{name}_shifted_test",
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
        f"{name}_global_test": "on all rows",
        f"{name}_shifted_test": "on corrupted rows",
        "share_benefit": "benefit",
        "worst_decile": "worst 10%",
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
    """A summary's value as the table shows it; a deviation is given its mean as ``scale``, whose digits it follows."""
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
) -> str:
    """The report of methods by label, with a record per split and seed; ``command`` is what made it, ``notes`` what else to know.

    ``failed`` says of methods that could not be measured why, ``yardsticks`` are what the methods are held against.
    """
    evidence = Evidence(results, failed or {}, yardsticks or {})
    sections = [
        section("", *(f"<p>{paragraph}</p>" for paragraph in story(evidence))),
        section("The methods", _methods(evidence)),
        section("Round by round, and for the traffic", _curves(evidence)),
        section("Client by client", _dots(evidence), _gains(evidence)),
        section("New clients", _newcomers(evidence)),
        section("Which rows each model gets right", _shares(evidence)),
        *(section(title, *parts) for title, parts in diagnostics.sections(evidence)),
        section("Privacy", *_privacy(results)),
        section("Tuning", *_tuning(evidence)),
        section("The data", listed(dict.fromkeys([*(note for r in evidence.records for note in r.notes), *notes]))),
        section("Settings", _settings(evidence), _options(evidence)),
        section("How to reproduce it", _reproduce(evidence, command)),
        section("What the columns mean", _meanings()),
    ]
    title = f"fedtailor: {', '.join(datasets(evidence))}"
    return document(title, f"<h1>Who gains by learning together?</h1>{''.join(sections)}")


def _privacy(results: Results) -> list[str]:
    """What private runs protect, and what is not counted; nothing where none is private."""
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


def terminal_rows(evidence: Evidence) -> list[dict[str, str]]:
    """The table of the methods as a terminal shows it: the best on validation first, yardsticks in brackets, failures last."""
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
    """(round, megabytes so far, measure) at the rounds that every seed evaluated, mean over seeds."""
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


def _tuning(evidence: Evidence) -> list[str]:
    """What was tried for each method, folded away; seeds with the same tuning together."""
    out = []
    for label, records in evidence.results.items():
        groups: list[tuple[Mapping[str, Any], list[str]]] = []
        for record in records:
            if record.tuning is not None:
                seeds = next((seeds for tuning, seeds in groups if tuning == record.tuning), None)
                if seeds is None:
                    groups.append((record.tuning, seeds := []))
                seeds.append(str(record.summary.get("seed", "-")))
        for tuning, seeds in groups:
            out.append(_trials(label if len(groups) == 1 else f"{label} (seed {', '.join(seeds)})", tuning))
    return out


def _trials(title: str, tuning: Mapping[str, Any]) -> str:
    chosen = dict(tuning.get("chosen") or {})
    grid = "; ".join(f"{name} in {', '.join(map(_value, values))}" for name, values in dict(tuning.get("grid") or {}).items())
    trials = list(tuning.get("trials") or [])
    rows = []
    for trial in trials[:TRIALS]:
        settings = dict(trial.get("settings") or {})
        score = number(trial.get("score"))
        cells = (_named_values(settings), "-" if score is None else plain(score), _value(trial.get("rounds", "-")))
        row = "".join(f"<td>{escape(content)}</td>" for content in cells)
        rows.append(f"<tr{' class=best' if settings == chosen else ''}>{row}</tr>")
    more = f"<p>{len(trials) - TRIALS:,} more are not listed.</p>" if len(trials) > TRIALS else ""
    head = f"{title}: {_named_values(chosen) or 'nothing'} chosen of {len(trials):,} tried"
    words = f"<p>Grid: {escape(grid)}.</p>" if grid else ""
    inside = table(["settings", "score on validation", "rounds"], rows)
    return f"<details><summary>{escape(head)}</summary>{words}{inside}{more}</details>"


def _settings(evidence: Evidence) -> str:
    rows = []
    for label, records in evidence.results.items():
        written_settings = "<br>".join(f"<code>{escape(s)}</code>" for s in dict.fromkeys(record.settings for record in records))
        engines = ", ".join(dict.fromkeys(str(record.summary.get("engine", "-")) for record in records))
        rows.append(f"<tr><td>{escape(label)}</td><td>{written_settings}</td><td>{escape(engines)}</td></tr>")
    return table(["method", "as in Python; what is not said is the default", "engine"], rows, "words")


def _options(evidence: Evidence) -> str:
    """The runs' options: one line where all agree, else which label has which."""
    rows = []
    for key in dict.fromkeys(key for record in evidence.records for key in record.options if key != "seed"):
        users: dict[str, list[str]] = {}
        for label, records in evidence.results.items():
            for record in records:
                if key in record.options:
                    users.setdefault(_value(record.options[key]), []).append(label)
        ways = [value + (f" ({', '.join(dict.fromkeys(labels))})" if len(users) > 1 else "") for value, labels in users.items()]
        rows.append(f"<tr><td>{escape(key)}</td><td>{'<br>'.join(map(escape, ways))}</td></tr>")
    return table(["option", "value"], rows, "words") if rows else ""


def _reproduce(evidence: Evidence, command: str | None) -> str:
    versions = {str(record.summary["version"]) for record in evidence.records if record.summary.get("version")} or {__version__}
    facts = [
        f"fedtailor {', '.join(sorted(versions))}",
        f"seeds: {', '.join(map(str, evidence.seeds))}",
        "The same seed gives the same numbers, on any number of processes; another engine changes the last digits."
        if not any(record.summary.get(key) for record in evidence.records for key in ("noise_secret", "user_noise_secret"))
        else "The noise is secret: what is private here cannot be repeated, and the same command gives other numbers.",
    ]
    source = f"<pre>{escape(command)}</pre>" if command else "<p>Made from Python, with the settings and options above.</p>"
    return source + listed(facts)


def _meanings() -> str:
    return "<dl>" + "".join(f"<dt>{escape(title)}</dt><dd>{escape(text)}</dd>" for title, text in MEANINGS.items()) + "</dl>"


def _over_seeds(evidence: Evidence) -> str:
    counts = {"split": len(evidence.splits), "seed": len(evidence.seeds)}
    parts = [f"{count} {noun}s" for noun, count in counts.items() if count > 1]
    return f" (mean over {' and '.join(parts)})" if parts else ""


def _named_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
