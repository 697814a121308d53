"""What a private run protects, in sentences: the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOT_PRIVATE = "NOT PRIVATE"


def story(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what can be said of the privacy of runs by label, the worst client first; nothing where none is private."""
    out = [line for label, summary in summaries.items() for line in (*_of_rows(label, summary), *_of_clients(label, summary))]
    everything = "other methods, seeds, trials of tuning and the run that was the start included"
    for key, of_one_run, of in (
        ("epsilon_composed", "epsilon_max", "a row of the client that spends most"),
        ("user_epsilon_composed", "user_epsilon", "a whole client"),
    ):
        composed, own = _largest(summaries, key), _largest(summaries, of_one_run)
        if composed is not None and own is not None and composed > own * 1.0001:
            out.append(f"Whoever sees all of it, {everything}, sees epsilon = {composed:.3g} of {of}")
    return out


def worst_of(summaries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the summary of the seed in which a client spends most; the first where none is private."""
    return max(summaries, key=lambda summary: summary.get("epsilon_max") or 0.0)


def _largest(summaries: Mapping[str, Mapping[str, Any]], key: str) -> float | None:
    return max((summary[key] for summary in summaries.values() if summary.get(key) is not None), default=None)


def _of_rows(label: str, summary: Mapping[str, Any]) -> list[str]:
    if "noise" not in summary:
        return []
    if not summary.get("noise_secret", False):
        return [
            f"{label} is {NOT_PRIVATE}: whoever knows its seed can take the noise off again; leave out --dp-seed where it matters"
        ]
    if summary.get("epsilon_max") is None:
        return [f"{label} is {NOT_PRIVATE}: there is no noise, and epsilon has no bound"]
    if not summary.get("private", True):
        return [f"{label} is {NOT_PRIVATE}: delta = {summary['delta']:.2g} allows a client's row to be published as it is"]
    lines = [
        f"{label}: one training row changes what its client sends and predicts with by epsilon = {summary['epsilon_max']:.3g} "
        f"at most (the client that spends most; {summary['epsilon']:.3g} on average), delta = {summary['delta']:.2g}"
    ]
    if summary.get("new_epsilon_max") is not None:
        lines.append(
            f"{label}: of the clients that were held out, a row changes what its client predicts with by epsilon = "
            f"{summary['new_epsilon_max']:.3g} at most ({summary['new_epsilon']:.3g} on average)"
        )
    return lines


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
