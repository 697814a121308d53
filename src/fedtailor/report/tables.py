"""The table of a comparison for a paper: LaTeX, CSV or Markdown; mean and deviation, the best in bold, what cannot be told from
the best on validation marked."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Literal

from fedtailor.metrics.verdict import plain
from fedtailor.report.evidence import Evidence
from fedtailor.task.scores import score_named

Form = Literal["latex", "csv", "markdown"]
LEVEL = 0.05
SPECIAL = {"&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}"}
SPECIAL |= {"^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}


@dataclass(frozen=True)
class Entry:
    """A measure of a method; ``best`` has the best mean of its column."""

    mean: float
    deviation: float | None
    best: bool = False


@dataclass(frozen=True)
class Line:
    """A method's row. ``alike`` says that the test does not tell it from the one chosen on validation (None: no test)."""

    label: str
    entries: tuple[Entry | None, ...]
    chosen: bool
    p: float | None

    @property
    def alike(self) -> bool:
        return self.p is not None and self.p >= LEVEL


def lines_of(evidence: Evidence) -> tuple[list[str], list[Line]]:
    """Return the titles of the measures and a line per method, the best on validation first."""
    long = score_named(evidence.name).title
    keys = {f"{evidence.name}_personal": f"personal {long}", f"{evidence.name}_global": f"shared {long}"}
    averaged = {key: {label: evidence.average(label, key) for label in evidence.order} for key in keys}
    top = {
        key: max((evidence.score.merit(average.mean) for average in column.values() if average is not None), default=None)
        for key, column in averaged.items()
    }
    lines = []
    for label in evidence.order:
        averages = {key: averaged[key][label] for key in keys}
        entries = tuple(
            None if average is None else Entry(average.mean, average.deviation, evidence.score.merit(average.mean) == top[key])
            for key, average in averages.items()
        )
        chosen = label == evidence.best and len(evidence.results) > 1
        lines.append(Line(label, entries, chosen, evidence.p_values.get(label)))
    return list(keys.values()), lines


def table(evidence: Evidence, form: Form) -> str:
    """Return the table in one of the forms."""
    titles, lines = lines_of(evidence)
    if form == "csv":
        return _csv(titles, lines)
    return _latex(evidence, titles, lines) if form == "latex" else _markdown(evidence, titles, lines)


def _csv(titles: list[str], lines: list[Line]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spread = [word for title in titles for word in (title, f"{title}, deviation")]
    writer.writerow(["method", *spread, "chosen on validation", "p against the chosen"])
    for line in lines:
        numbers = [value for e in line.entries for value in (("", "") if e is None else (e.mean, e.deviation))]
        writer.writerow(
            [line.label, *("" if n is None else n for n in numbers), int(line.chosen), "" if line.p is None else line.p]
        )
    return text.getvalue()


def _markdown(evidence: Evidence, titles: list[str], lines: list[Line]) -> str:
    out = [f"| method | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    for line in lines:
        cells = ["-" if e is None else f"**{_number(e, ' ± ')}**" if e.best else _number(e, " ± ") for e in line.entries]
        label = line.label.replace("|", "\\|") + (" \\*" if line.chosen else " †" if line.alike else "")
        out.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join([*out, "", _notes(evidence, lines, "\\*", "†")]) + "\n"


def _latex(evidence: Evidence, titles: list[str], lines: list[Line]) -> str:
    out = [rf"\begin{{tabular}}{{l{'c' * len(titles)}}}", r"\hline"]
    out += [" & ".join(["method", *map(_escaped, titles)]) + r" \\", r"\hline"]
    for line in lines:
        numbers = ["--" if e is None else f"${_number(e, chr(92) + 'pm ')}$" for e in line.entries]
        cells = [rf"{{\boldmath{n}}}" if e is not None and e.best else n for e, n in zip(line.entries, numbers, strict=True)]
        mark = r"$^{*}$" if line.chosen else r"$^{\dagger}$" if line.alike else ""
        out.append(" & ".join([_escaped(line.label) + mark, *cells]) + r" \\")
    return "\n".join([*out, r"\hline", r"\end{tabular}", f"% {_notes(evidence, lines, '*', 'dagger')}"]) + "\n"


def _number(entry: Entry, between: str) -> str:
    return plain(entry.mean) + ("" if entry.deviation is None else f"{between}{plain(entry.deviation, entry.mean)}")


def _notes(evidence: Evidence, lines: list[Line], star: str, dagger: str) -> str:
    """Say what the marks and the deviation mean, as far as they occur."""
    over = "splits" if len(evidence.splits) > 1 else "seeds"
    count = len(evidence.splits) if len(evidence.splits) > 1 else len(evidence.seeds)
    notes = [f"Mean and standard deviation over {count} {over}; bold: the best mean."] if count > 1 else ["Bold: the best mean."]
    if any(line.chosen for line in lines):
        notes.append(f"{star} chosen on validation.")
    if any(line.alike for line in lines):
        notes.append(f"{dagger} not told from it by a paired test over clients or splits (p >= {LEVEL:g}, Holm).")
    return " ".join(notes)


def _escaped(words: str) -> str:
    return "".join(SPECIAL.get(letter, letter) for letter in words)
