"""The report's part on what a method says about single rows: box plots by group of rows, place by place, and declared costs.

A method describes its figures (``Algorithm.figures``), each a table with

- ``title``: of the section; figures of several methods with the same title stand together;
- ``of``: the entry of the summary whose ``groups`` hold quantiles and means between 0 and 1, by ``places``;
- ``about``: what the numbers are; ``middle``: what it means to lie above one half;
- ``notes``: sentences (``text``) with a place {} for ``values``, which are averaged over the seeds;
- ``costs``, if any: columns with ``titles`` of (number, formula) by method, to stand beside the bytes that were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from fedtailor.algorithms import registry
from fedtailor.metrics.rows import QUANTILES
from fedtailor.report.draw import WIDTH, hint, svg, text
from fedtailor.report.evidence import Evidence
from fedtailor.report.pieces import figure, table

GROUPS = {"both_correct": ("both right", "#0072B2"), "global_only": ("only shared right", "#E69F00")}
GROUPS |= {"personal_only": ("only personal right", "#009E73")}
LEFT, TOP, HEIGHT, STEP = 64, 30, 220, 26
Figure = Mapping[str, Any]


def sections(evidence: Evidence) -> list[tuple[str, list[str]]]:
    """Return (title, parts) for every kind of figure that the methods describe."""
    out: dict[str, list[str]] = {}
    costs: dict[str, Figure] = {}
    for label, records in evidence.results.items():
        described = [figures_of(record.summary) for record in records]
        for first, *others in zip(*described, strict=False):
            values = [record.summary[first["of"]] for record in records]
            out.setdefault(first["title"], []).append(_figure(label, [first, *others], values))
            if "costs" in first:
                costs.setdefault(first["title"], first["costs"])
    return [(title, [*parts, *([_costs(evidence, costs[title])] if title in costs else [])]) for title, parts in out.items()]


def figures_of(summary: Mapping[str, Any]) -> Sequence[Figure]:
    """Return the figures that a run's method described; where an older run did not keep them, as one of ours describes them
    now."""
    method = registry.get(summary.get("algorithm", ""))
    described: Sequence[Figure] = summary.get("figures") or ([] if method is None else method.figures(summary))
    return described


def _figure(label: str, figures: Sequence[Figure], values: Sequence[Mapping[str, Any]]) -> str:
    """Draw the box plots of a method; ``figures`` and ``values`` are those of its seeds."""
    first = figures[0]
    groups = {key: _over_seeds(values, key) for key in (*GROUPS, "all")}
    shown = {
        key: boxes for key, boxes in groups.items() if boxes is not None and (key in GROUPS or len(values[0]["groups"]) == 1)
    }
    if not shown:
        return ""
    rows = {key: int(sum(v["groups"][key]["rows"] for v in values)) for key in shown}
    seeds = f"; quantiles averaged over {len(values)} seeds" if len(values) > 1 else ""
    caption = (
        f"{label}: {first['about']}. The box holds the middle half of the rows, the line "
        f"{100 * (QUANTILES[-1] - QUANTILES[0]):.0f} % of them, the bar is the median, the dot the mean"
        f"{seeds}. {first['middle']} Rows: {', '.join(f'{_title(key)} {n:,}' for key, n in rows.items())}."
    )
    for i, note in enumerate(first["notes"]):
        means = np.array([figure["notes"][i]["values"] for figure in figures], float).mean(0)
        caption += " " + note["text"].format(", ".join(f"{mean:.2f}" for mean in means))
    picture = boxes(first["places"], shown, label)
    return figure(picture, caption)


def _title(key: str) -> str:
    return GROUPS[key][0] if key in GROUPS else "all"


def _over_seeds(values: Sequence[Mapping[str, Any]], key: str) -> list[list[float]] | None:
    """Return for each place a group's quantiles and mean, averaged over the seeds in which it has rows."""
    tables = [
        np.column_stack([r["groups"][key]["quantiles"], r["groups"][key]["mean"]])
        for r in values
        if r["groups"].get(key, {}).get("rows")
    ]
    averages: list[list[float]] | None = np.mean(tables, 0).tolist() if tables else None
    return averages


def boxes(names: Sequence[str], groups: Mapping[str, Sequence[Sequence[float]]], title: str) -> str:
    """Draw box plots: a cluster per place, a box per group; each is (5 quantiles, mean) between 0 and 1."""
    base = TOP + HEIGHT
    cluster = (WIDTH - LEFT - 20) / len(names)
    step = min(STEP, cluster / (len(groups) + 1))

    def y(q: float) -> float:
        return base - HEIGHT * q

    out = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        dash = ' stroke-dasharray="4 3" stroke="#333"' if tick == 0.5 else ' stroke="#e4e4e4"'
        out.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - 20}"{dash}/>{text(LEFT - 7, y(tick) + 4, f"{tick:g}", "end")}')
    for j, name in enumerate(names):
        middle = LEFT + cluster * (j + 0.5)
        name = f"layer {j + 1}" if name.isdigit() else name  # a number is a place among all modules, activations too
        out.append(text(middle, base + 20, name, "middle"))
        for k, (key, places) in enumerate(groups.items()):
            color = GROUPS.get(key, ("", "#333"))[1]
            at = middle + step * (k - (len(groups) - 1) / 2)
            tooltip = f"{name}, {_title(key)}: median {places[j][2]:.3f}"
            out.append(_box(at, step * 0.7, [y(q) for q in places[j]], color, tooltip))
    for k, key in enumerate(groups):
        x = LEFT + 190 * k
        color = GROUPS.get(key, ("", "#333"))[1]
        out.append(f'<path d="M{x} 6h14v12h-14z" fill="none" stroke="{color}" stroke-width="2"/>')
        out.append(text(x + 20, 16, _title(key), "start"))
    return svg(out, base + 30, f"{title}: rows by group")


def _box(x: float, width: float, heights: Sequence[float], color: str, tooltip: str) -> str:
    low, first, median, third, high, mean = heights
    a, b = x - width / 2, x + width / 2
    line = f"M{x:.1f} {low:.1f}V{first:.1f}M{x:.1f} {third:.1f}V{high:.1f}M{a:.1f} {first:.1f}H{b:.1f}V{third:.1f}H{a:.1f}z"
    return (
        f"<g>{hint(tooltip)}"
        f'<path d="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        f'<path d="M{a:.1f} {median:.1f}H{b:.1f}" stroke="{color}" stroke-width="3"/>'
        f'<circle cx="{x:.1f}" cy="{mean:.1f}" r="2.5" fill="{color}"/></g>'
    )


def _costs(evidence: Evidence, costs: Figure) -> str:
    """Return a table of declared costs by method, beside the bytes sent in the runs."""
    rows = []
    for label, records in evidence.results.items():
        summary = records[0].summary
        declared = costs["methods"].get(summary["algorithm"], [None] * len(costs["titles"]))
        visits = sum(line["cohort"] for line in records[0].rounds)
        cells = [
            escape(label),
            *("-" if amount is None else f"{amount[0]:,}<small>{escape(amount[1])}</small>" for amount in declared),
            f"{summary['bytes_up'] / visits / 1e3:,.1f}" if visits else "-",
            f"{summary['trained_parameters']:,}",
        ]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    titles = ["method", *costs["titles"], "kB sent up by a client in a round, measured", "trained, measured"]
    return f"<p>{escape(costs['text'])}</p>{table(titles, rows)}"
