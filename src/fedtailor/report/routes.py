"""The report's part on routing: how likely rows take the shared path, layer by layer, and what routing costs.

Box plots of q_0 for the rows that both models get right, only the shared one, only the personal one (FLOW Figure 2); parameters
kept and sent beside the formulas of FLOW Table 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from fedtailor.metrics.routes import QUANTILES
from fedtailor.report.evidence import Evidence

TITLE = "Which path rows take"
GROUPS = {"both_correct": ("both right", "#0072B2"), "global_only": ("only shared right", "#E69F00")}
GROUPS |= {"personal_only": ("only personal right", "#009E73")}
WIDTH, LEFT, TOP, HEIGHT, STEP = 960, 64, 30, 220, 26
# FLOW Table 4: models w and routers psi (numbers of each) that a client keeps, and that it sends in a round
TABLE_4 = {
    "FedAvgFT": ((1, 0), (1, 0)),
    "Ditto": ((2, 0), (1, 0)),
    "APFL": ((3, 0), (1, 0)),
    "HypCluster": ((2, 0), (1, 0)),
    "Flow": ((2, 1), (1, 1)),
}


def parts(evidence: Evidence) -> list[str]:
    """A figure per method that routes, and the table of costs; nothing where none does."""
    found = {label: [r.summary["routing"] for r in records] for label, records in evidence.results.items() if _routes(records)}
    if not found:
        return []
    return [*(_figure(label, routings) for label, routings in found.items()), _costs(evidence, next(iter(found.values()))[0])]


def _routes(records: Sequence[Any]) -> bool:
    return bool(records) and all(record.summary.get("routing") for record in records)


def _figure(label: str, routings: Sequence[Mapping[str, Any]]) -> str:
    names = routings[0]["routes"]
    groups = {key: _over_seeds(routings, key) for key in (*GROUPS, "all")}
    shown = {
        key: boxes for key, boxes in groups.items() if boxes is not None and (key in GROUPS or len(routings[0]["groups"]) == 1)
    }
    rows = {key: int(sum(r["groups"][key]["rows"] for r in routings)) for key in shown}
    first = routings[0]
    seeds = f"; quantiles averaged over {len(routings)} seeds" if len(routings) > 1 else ""
    text = (
        f"{label}: probability of the shared path, layer by layer. The box holds the middle half of the rows, the line "
        f"{100 * (QUANTILES[-1] - QUANTILES[0]):.0f} % of them, the bar is the median, the dot the mean"
        f"{seeds}. Above one half a row takes the shared layer. Rows: "
        f"{', '.join(f'{_title(key)} {n:,}' for key, n in rows.items())}."
    )
    if first["multiply_adds_shared"]:
        ratio = np.mean([r["multiply_adds_personal"] / r["multiply_adds_shared"] for r in routings])
        text += f" A personal prediction takes {ratio:.2f} times the multiply-adds of the shared model alone, with the router's."
    if first.get("kind_auc"):
        areas = np.array([[np.nan if a is None else a for a in r["kind_auc"]] for r in routings]).mean(0)
        text += f" Told by the layers' probability, a row's kind has AUC {', '.join(f'{a:.2f}' for a in areas)}."
    return (
        f'<figure><div class="scroll">{boxes(names, shown, label)}</div><figcaption>{escape(text)}</figcaption></figure>'
        if shown
        else ""
    )


def _title(key: str) -> str:
    return GROUPS[key][0] if key in GROUPS else "all"


def _over_seeds(routings: Sequence[Mapping[str, Any]], key: str) -> list[list[float]] | None:
    """Per route the quantiles and the mean of a group, averaged over the seeds in which it has rows."""
    found = [
        np.column_stack([r["groups"][key]["quantiles"], r["groups"][key]["mean"]])
        for r in routings
        if r["groups"].get(key, {}).get("rows")
    ]
    averages: list[list[float]] | None = np.mean(found, 0).tolist() if found else None
    return averages


def boxes(names: Sequence[str], groups: Mapping[str, Sequence[Sequence[float]]], title: str) -> str:
    """Box plots: a cluster per route, a box per group; each is (5 quantiles, mean) between 0 and 1."""
    base = TOP + HEIGHT
    cluster = (WIDTH - LEFT - 20) / len(names)
    step = min(STEP, cluster / (len(groups) + 1))

    def y(q: float) -> float:
        return base - HEIGHT * q

    out = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        dash = ' stroke-dasharray="4 3" stroke="#333"' if tick == 0.5 else ' stroke="#e4e4e4"'
        out.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - 20}"{dash}/>{_text(LEFT - 7, y(tick) + 4, f"{tick:g}", "end")}')
    for j, name in enumerate(names):
        middle = LEFT + cluster * (j + 0.5)
        name = f"layer {j + 1}" if name.isdigit() else name  # a number is a place among all modules, activations too
        out.append(_text(middle, base + 20, name, "middle"))
        for k, (key, found) in enumerate(groups.items()):
            colour = GROUPS.get(key, ("", "#333"))[1]
            at = middle + step * (k - (len(groups) - 1) / 2)
            out.append(_box(at, step * 0.7, [y(q) for q in found[j]], colour, f"{name}, {_title(key)}: median {found[j][2]:.3f}"))
    for k, key in enumerate(groups):
        x = LEFT + 190 * k
        colour = GROUPS.get(key, ("", "#333"))[1]
        out.append(f'<path d="M{x} 6h14v12h-14z" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(_text(x + 20, 16, _title(key), "start"))
    inside = "".join(out)
    return f'<svg viewBox="0 0 {WIDTH} {base + 30}" role="img" aria-label="{escape(title)}: paths of rows">{inside}</svg>'


def _box(x: float, width: float, heights: Sequence[float], colour: str, words: str) -> str:
    low, first, median, third, high, mean = heights
    a, b = x - width / 2, x + width / 2
    line = f"M{x:.1f} {low:.1f}V{first:.1f}M{x:.1f} {third:.1f}V{high:.1f}M{a:.1f} {first:.1f}H{b:.1f}V{third:.1f}H{a:.1f}z"
    return (
        f"<g><title>{escape(words)}</title>"
        f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        f'<path d="M{a:.1f} {median:.1f}H{b:.1f}" stroke="{colour}" stroke-width="3"/>'
        f'<circle cx="{x:.1f}" cy="{mean:.1f}" r="2.5" fill="{colour}"/></g>'
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _costs(evidence: Evidence, routing: Mapping[str, Any]) -> str:
    """Parameters kept and sent per client and round by Table 4's formulas, beside the bytes sent in the runs."""
    w, psi = routing["model_parameters"], routing["router_parameters"]
    rows = []
    for label, records in evidence.results.items():
        summary = records[0].summary
        kept, sent = TABLE_4.get(summary["algorithm"], (None, None))
        visits = sum(line["cohort"] for line in records[0].rounds)
        cells = [
            escape(label),
            *(_formula(amount, w, psi) for amount in (kept, sent)),
            f"{summary['bytes_up'] / visits / 1e3:,.1f}" if visits else "-",
            f"{summary['trained_parameters']:,}",
        ]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    titles = ["method", "kept (Table 4)", "sent (Table 4)", "kB sent up by a client in a round, measured", "trained, measured"]
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    text = f"Parameters per client by the formulas of Flow's paper, with |w| = {w:,} and a router of |psi| = {psi:,}."
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<p>{escape(text)}</p><div class="scroll">{table}</div>'


def _formula(amount: tuple[int, int] | None, w: int, psi: int) -> str:
    if amount is None:
        return "-"
    models, routers = amount
    words = f"{models if models > 1 else ''}|w|" + (" + |psi|" if routers else "")
    return f"{models * w + routers * psi:,}<small>{words}</small>"
