"""What a private run protects, in sentences: the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOT_PRIVATE = "NOT PRIVATE"


def story(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what can be said of the privacy of runs by label, the worst client first; nothing where none is private."""
    out = [line for label, summary in summaries.items() for line in (*_of_rows(label, summary), *_of_clients(label, summary))]
    composed = [s["epsilon_composed"] for s in summaries.values() if s.get("epsilon_composed") is not None]
    own = [s["epsilon_max"] for s in summaries.values() if s.get("epsilon_max") is not None]
    if composed and max(composed) > max(own) * 1.0001:
        out.append(
            f"Whoever sees all of it, trials of tuning and other seeds included, sees epsilon = {max(composed):.3g} "
            "of the client that spends most"
        )
    return out


def _of_rows(label: str, summary: Mapping[str, Any]) -> list[str]:
    if "noise" not in summary:
        return []
    if not summary.get("noise_secret", False):
        return [
            f"{label} is {NOT_PRIVATE}: whoever knows its seed can take the noise off again; leave out --dp-seed where it matters"
        ]
    if summary.get("epsilon_max") is None:
        return [f"{label} is {NOT_PRIVATE}: there is no noise, and epsilon has no bound"]
    return [
        f"{label}: one training row changes what its client sends and predicts with by epsilon = {summary['epsilon_max']:.3g} "
        f"at most (the client that spends most; {summary['epsilon']:.3g} on average), delta = {summary['delta']:.2g}"
    ]


def _of_clients(label: str, summary: Mapping[str, Any]) -> list[str]:
    if "user_epsilon" not in summary:
        return []
    if not summary["user_noise_secret"]:
        return [f"{label} is {NOT_PRIVATE} for whole clients: whoever knows user_seed can take the noise off again"]
    return [
        f"{label}: a whole client, with all its rows, changes the shared model by epsilon = {summary['user_epsilon']:.3g} "
        f"at most, delta = {summary['user_delta']:.2g}; what it keeps for itself and its own scores are not part of that"
    ]


def not_counted(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what was learnt from the rows of private runs beside what epsilon counts."""
    return list(dict.fromkeys(line for summary in summaries for line in summary.get("not_counted", ())))
