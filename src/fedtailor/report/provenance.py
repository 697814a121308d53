"""The end of a page of runs: how settings were chosen, what they are, how to do it again, and what the columns mean."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from fedtailor.metrics.verdict import plain
from fedtailor.report.evidence import Evidence, number
from fedtailor.report.pieces import listed, table
from fedtailor.version import __version__

TRIALS = 100  # settings tried that are listed

MEANINGS = {
    "validation": "mean over clients on their validation rows, of the personal model, clients with few rows counting less; it "
    "orders the table and chooses the best; of those within a standard error of it the lower loss goes first",
    "personal": "plain mean over clients of the personal model on the client's own test rows",
    "shared": "plain mean over clients of the shared model, with no local step, on the client's own test rows",
    "on all rows": "personal models on the union of the clients' test rows: how general they still are",
    "on corrupted rows": "the same on corrupted pictures (--shift), mean over the corruptions",
    "benefit": "share of clients whose personal model is strictly better than the shared one",
    "worst 10%": "mean of the personal models over the worst tenth of the clients",
    "MB up, MB down": "megabytes sent by and to the clients in all rounds, as they are serialised",
    "trained": "numbers a client trains in a round",
    "threshold": "from this probability on the second of two classes is said; chosen on all clients' validation rows",
    "epsilon": "privacy spent by the client that spends most: how far a training row can change what it sends and predicts with",
    "all runs' epsilon": "the client that spends most, over all runs and trials that looked at the same rows",
    "client's epsilon": "how far a whole client, with all its rows, can change the shared model",
    "time (s)": "seconds from start to end on the machine that ran it",
    "tuning (s)": "seconds that choosing the settings took, before the runs whose time is shown",
    "p": "two-sided p-value of the test that the interval belongs to, best method against this one; Holm's correction for all "
    "but the pair that the verdict is about",
    "±": "standard deviation over splits of the rows, or over seeds where there is one split",
    "mean gain": "over clients, paired on the same rows; clients count alike from the median number of test rows on, those with "
    "fewer in proportion, so that one row does not weigh like hundreds; where that makes a difference the plain mean is said too",
    "95 % interval": "of the mean gain, by Student's law: over clients, or over splits of the rows where these leave more room "
    "or clients are fewer than six; splits of the same rows overlap, and their variance is corrected for it (Nadeau and Bengio "
    "2003)",
}


def tuning(evidence: Evidence) -> list[str]:
    """Return what was tried for each method, folded away; seeds with the same tuning together."""
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


def settings(evidence: Evidence) -> str:
    """Return the table of every method's settings and engine."""
    rows = []
    for label, records in evidence.results.items():
        written_settings = "<br>".join(f"<code>{escape(s)}</code>" for s in dict.fromkeys(record.settings for record in records))
        engines = ", ".join(dict.fromkeys(str(record.summary.get("engine", "-")) for record in records))
        rows.append(f"<tr><td>{escape(label)}</td><td>{written_settings}</td><td>{escape(engines)}</td></tr>")
    return table(["method", "as in Python; what is not said is the default", "engine"], rows, "words")


def options(evidence: Evidence) -> str:
    """Return the table of the runs' options: one line where all agree, else which label has which."""
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


def reproduce(evidence: Evidence, command: str | None) -> str:
    """Return what made the runs, and what the same command would give."""
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


def meanings() -> str:
    """Return what the columns of the page mean."""
    return "<dl>" + "".join(f"<dt>{escape(title)}</dt><dd>{escape(text)}</dd>" for title, text in MEANINGS.items()) + "</dl>"


def _named_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
