"""The ledger: every claim with what was measured, what the paper says, and whether it held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedtailor.papers.base import Experiment, interval
from fedtailor.papers.results import BySeed

LIMITS = (
    "Where the paper gives no number the limit is ours. Limits and some wordings were settled on seeds 0 to 2; later seeds are "
    "fresh. Settled so: a step size is judged by the rounds to a floor and not by the first look, rounds over the condition "
    "number from lam = 1 on, a middle lam where clients differ and not where they are alike, FedAvg-P's floor against "
    "Scaffold-P's. Of the first two the earlier forms are kept, as claims that need not hold; so are those that did not hold."
)
WORDS = {True: "held", False: "not held", None: "not tried"}


def rows_of(name: str, experiment: Experiment, by_seed: BySeed) -> list[dict[str, Any]]:
    """Return a row per claim of an experiment."""
    paper, _, short = name.partition("/")
    out = []
    for claim in experiment.claims:
        numbers = [float(claim.number(rows)) for rows in by_seed.values()]
        mean = float(np.mean(numbers)) if numbers else None
        out.append(
            {
                "paper": paper,
                "experiment": short,
                "claim": claim.words,
                "held": claim.holds(numbers),
                "convex": experiment.convex,
                "ours": mean if mean is not None and np.isfinite(mean) else None,
                "theirs": claim.theirs,
                "interval": interval(numbers),
                "seeds": len(numbers),
                "above": claim.above,
                "below": claim.below,
                "must": claim.must,
            }
        )
    return out


def failures(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the claims that must hold and do not."""
    return [row for row in rows if row["must"] and row["held"] is False]


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row as a table shows it."""
    ends = row["interval"]
    return {
        "experiment": f"{row['paper']}/{row['experiment']}",
        "claim": row["claim"],
        "ours": "-" if row["ours"] is None else f"{row['ours']:.3g}",
        "interval": "-" if ends is None else f"{ends[0]:.3g} to {ends[1]:.3g}",
        "holds if": " and ".join(
            f"{sign} {row[key]:g}" for key, sign in (("above", ">"), ("below", "<")) if row[key] is not None
        ),
        "paper": row["theirs"] or "-",
        "": WORDS[row["held"]] + ("" if row["must"] else " (need not)"),
    }


def page(sections: Mapping[str, tuple[Experiment, BySeed]], scale: str) -> str:
    """Return the ledger as a page: a section per experiment, with its settings, its claims and the numbers of its figure."""
    every = [row for name, (experiment, by_seed) in sections.items() for row in rows_of(name, experiment, by_seed)]
    count = {word: sum(WORDS[row["held"]] == word for row in every) for word in WORDS.values()}
    lines = [
        "# The papers' claims",
        "",
        f"Written by `fedtailor papers check --page`. {len(every)} claims at the scale `{scale}`: "
        + ", ".join(f"{number} {word}" for word, number in count.items())
        + ". A claim holds where its number lies beyond the limit in every seed; the interval is that of the mean over seeds "
        "(95 %, Student). The data are generated anew in every seed. `fedtailor papers run NAME` draws the figure.",
        "",
        LIMITS,
    ]
    for name, (experiment, by_seed) in sections.items():
        settings = ", ".join(
            f"{key} = {value}" for key, value in experiment.settings["laptop" if scale == "laptop" else "paper"].items()
        )
        lines += ["", f"## {name}", "", f"{experiment.title} ({experiment.source}). {len(by_seed)} seeds; {settings}.", ""]
        table = [cells(row) for row in rows_of(name, experiment, by_seed)]
        titles = [title for title in table[0] if title != "experiment"]
        lines += [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
        lines += [f"| {' | '.join(row[title] for title in titles)} |" for row in table]
    return "\n".join(lines) + "\n"
