"""A comparison as one self-contained HTML page: words first, then the table, then pictures."""

from __future__ import annotations

import dataclasses
import os
from html import escape
from pathlib import Path
from typing import Any

from fedtailor.algorithms.base import Algorithm
from fedtailor.engine.compare import Comparison
from fedtailor.metrics.client import score_name
from fedtailor.metrics.spread import gain
from fedtailor.report.figures import gains, lines

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}
tr.best td{font-weight:700;background:#eef5fb}svg{width:100%;height:auto;font:12px system-ui,sans-serif}
figure{margin:1.5rem 0}figcaption{color:#555}
"""
LEGEND = (
    "<b>personal</b> and <b>shared</b>: mean over clients on their own test rows, of the personal model and of the shared model "
    "with no local step. <b>on all rows</b>: personal models on the union of the test rows. <b>benefit</b>: share of clients "
    "whose personal model is strictly better than the shared one. <b>worst 10%</b>: mean over the worst tenth of the clients. "
    "<b>trained</b>: numbers a client trains in a round."
)


def headline(comparison: Comparison) -> dict[str, Any]:
    """Which method is best on validation (on the test rows only where there is no validation split), and how it did."""
    first = next(iter(comparison.values()))
    name = score_name(first.task.kind)
    judged = f"val_{name}_personal"
    by = judged if all(r.summary.get(judged) is not None for r in comparison.values()) else f"{name}_personal"
    pick = min if name == "mse" else max
    best = pick(comparison, key=lambda label: comparison[label].summary[by])
    return {"best": best, "chosen_by": by, **comparison[best].summary}


def columns(name: str) -> dict[str, str]:
    """Summary keys shown, and what they are called."""
    long = "accuracy" if name == "acc" else "MSE"
    return {
        f"{name}_personal": f"personal {long}",
        f"{name}_global": f"shared {long}",
        f"{name}_global_test": "on all rows",
        "share_benefit": "benefit",
        "worst_decile": "worst 10%",
        "bytes_up": "MB up",
        "trained_parameters": "trained",
        "seconds": "time (s)",
    }


def cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "bytes_up":
        return f"{value / 1e6:.2f}"
    if key == "share_benefit":
        return f"{100 * value:.0f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if key == "seconds" else f"{value:.4f}"


def settings_of(algorithm: Algorithm) -> str:
    """The method as it would be written: only what differs from its defaults."""
    given = []
    for f in dataclasses.fields(algorithm):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if (value := getattr(algorithm, f.name)) != default:
            given.append(f"{f.name}={value!r}")
    return f"{type(algorithm).__name__}({', '.join(given)})"


def page(comparison: Comparison) -> str:
    best = headline(comparison)
    first = next(iter(comparison.values()))
    name = score_name(first.task.kind)
    shown = columns(name)
    judge = "validation" if best["chosen_by"].startswith("val_") else "test, for lack of validation rows"
    words = [
        f"{len(comparison)} methods on {escape(first.summary['dataset'])}: {first.summary['clients']} clients, "
        f"{first.summary['rounds']} rounds, seed {first.summary['seed']}.",
        f"Best for the clients is <b>{escape(best['best'])}</b> (chosen on {judge}): its personal models reach "
        f"{best[f'{name}_personal']:.4f} on the clients' own test rows.",
    ]
    if best["share_benefit"] is not None:
        words.append(f"{100 * best['share_benefit']:.0f} % of the clients do strictly better with it than with its shared model.")
    rows = []
    for label, run in comparison.items():
        cells = "".join(f"<td>{cell(key, run.summary[key])}</td>" for key in shown)
        rows.append(f"<tr{' class=best' if label == best['best'] else ''}><td>{escape(label)}</td>{cells}</tr>")
    curves = {
        label: [(r["round"] + 1, r[f"{name}_personal"]) for r in run.history if f"{name}_personal" in r]
        for label, run in comparison.items()
    }
    pictures = [
        ("Personal models on the clients' own test rows, round by round.", lines(curves, "rounds", shown[f"{name}_personal"]))
    ]
    top = comparison[best["best"]]
    if f"{name}_global" in top.clients:
        picture = gains(gain(top.task.kind, top.clients).tolist(), "clients, sorted", "gain over the shared model")
        pictures.append((f"{best['best']}: how much each client gains by its personal model.", picture))
    figures = "".join(f"<figure>{svg}<figcaption>{escape(text)}</figcaption></figure>" for text, svg in pictures)
    settings = "".join(
        f"<li><code>{escape(settings_of(r.algorithm))}</code>: {escape(r.summary['engine'])}</li>" for r in comparison.values()
    )
    head = "".join(f"<th>{escape(title)}</th>" for title in ("method", *shown.values()))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>fedtailor report</title><style>{STYLE}</style>'
        f"<h1>Who gains by learning together?</h1><p>{' '.join(words)}</p>"
        f"<table><tr>{head}</tr>{''.join(rows)}</table><p>{LEGEND}</p>{figures}<h2>Settings</h2><ul>{settings}</ul></html>\n"
    )


def write(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page; the file is replaced whole or not at all."""
    target = Path(path)
    part = target.with_suffix(".part")
    part.write_text(page(comparison), encoding="utf-8")
    os.replace(part, target)
    return target
