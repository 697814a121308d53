"""The page of the fair tests of routing: a table for every set, and what Eq. (5) leaves of the shared model's update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedtailor.papers.base import Experiment
from fedtailor.papers.fair_routing import GATE, METHODS, POOL
from fedtailor.papers.flow.dilution import MIXED
from fedtailor.papers.results import BySeed

Sections = Mapping[str, tuple[Experiment, BySeed]]
DILUTION = "flow/dilution"
ABOUT = """\
# Flow and FlowGate beside their yardsticks

Written by `fedtailor papers pages`, from what `fedtailor papers run flow` measured. A seed draws rows, clients and training
anew. lr and finetune_lr of FedAvgFT, lr and gamma of the paper's Flow were chosen by validation rows of another federation
(seed 100, 40 clients, 60 rounds). FlowGate, its pool, stacking, averaging and the eased Flow have FedAvgFT's w and v; kNN-
Per has its w. The pool was designed on validation and test rows of federations of seed 100, which are not measured here.
Accuracy is the mean over clients; gain is over the better of FedAvgFT and averaging, with the paired 95 % interval over the
clients of each seed. AUC and calibration are the router's, on test rows where exactly one of w and v is right. The oracle
always takes the one that is right.

The goal: above the better of FedAvgFT and averaging with an interval above zero on two real sets and on generated rows that
show their kind, and nowhere more than half a point below it. What was measured, in points:
"""
NOT_TRIED = """
Of the fair test of the paper's claim, 1,500 rounds, three epochs of each model, five federations and convolutions are the scale
`paper`, which was not run; clients that come later were not measured.
"""


def page(sections: Sections) -> str | None:
    """Return the page, from the sections of routing that were measured; None where there is none."""
    fair = {name: found for name, found in sections.items() if found[1] and "yardstick" in next(iter(found[1].values()))[0]}
    if not fair:
        return None
    lines = [ABOUT]
    for experiment, by_seed in fair.values():
        parts = [f"{label} {', '.join(gain(row, 100) for row in rows_of(by_seed, label))}" for label in (GATE, POOL)]
        lines.append(f"- {experiment.title}: {'; '.join(parts)}")
    lines.append(NOT_TRIED)
    for experiment, by_seed in fair.values():
        settings = experiment.settings["laptop"]
        rows = f" with {settings['rows']} rows" if "rows" in settings else ""
        lines += [f"## {experiment.title}, {len(by_seed)} seed{'s' * (len(by_seed) > 1)}", ""]
        lines += [
            f"{settings['clients']} clients{rows}, {settings['cohort']} in a round, {settings['rounds']} rounds, "
            f"{settings['model']}.",
            "",
        ]
        lines += [
            "| method | accuracy | gain | AUC | calibration |",
            "|---|---|---|---|---|",
            *(row(by_seed, label) for label in METHODS),
            "",
        ]
    return "\n".join(lines + dilution(sections)) + "\n"


def rows_of(by_seed: BySeed, label: str) -> list[dict[str, Any]]:
    """Return a method's row in every seed."""
    return [row for rows in by_seed.values() for row in rows if row["method"] == label]


def gain(row: Mapping[str, float], scale: float = 1.0) -> str:
    """Return how far a method is above the yardstick, with its interval."""
    digits = 2 if scale > 1 else 4
    middle, low, high = (scale * row[key] for key in ("gain", "low", "high"))
    return f"{middle:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def row(by_seed: BySeed, label: str) -> str:
    """Return a method's line in the table of a set."""
    found = rows_of(by_seed, label)
    area, off = (mean([one[key] for one in found]) for key in ("auc", "calibration"))
    return f"| {label} | {mean([one['accuracy'] for one in found])} | {'; '.join(gain(one) for one in found)} | {area} | {off} |"


def mean(values: Sequence[float | None]) -> str:
    """Return a mean over seeds; a dash where there is nothing."""
    numbers = [value for value in values if value is not None]
    return f"{np.mean(numbers):.4f}" if numbers else "-"


def dilution(sections: Sections) -> list[str]:
    """Return what is left of the shared model's update, by the router's probability of the shared path."""
    if DILUTION not in sections or not sections[DILUTION][1]:
        return []
    by_seed = sections[DILUTION][1]
    lines = [
        "## What Eq. (5) leaves of the shared model's update",
        "",
        "After 20 rounds of FedAvg on generated rows, one round with a fixed q0 in all layers: the averaged update of w by Eq. "
        "(5), projected on that of w's own risk on the same rows and steps (1: nothing is lost), by seed. It shrinks as q0 does: "
        "a router that turns to v starves w.",
        "",
        "| q0 | projection |",
        "|---|---|",
    ]
    for q0 in dict.fromkeys(row["q0"] for rows in by_seed.values() for row in rows):
        left = [
            f"{row['projection']:.3f}" for rows in by_seed.values() for row in rows if row["q0"] == q0 and row["risk"] == MIXED
        ]
        lines.append(f"| {q0:g} | {', '.join(left)} |")
    return [*lines, "", "![The projection over q0](../papers/flow-dilution.svg)"]
