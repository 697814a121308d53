"""From per-client measures to a summary: means, who benefits, the worst decile, the spread over clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.metrics.paired import client_weights
from fedtailor.task.kinds import KINDS, kind_of
from fedtailor.task.scores import Metric

Columns = Mapping[str, NDArray[np.float64]]


def summarize(kind: str, clients: Columns, score: Metric | None = None) -> dict[str, Any]:
    """Plain means over clients (and, as ``*_weighted``, by test rows); null where a measure does not apply.

    ``share_benefit``: share of clients whose personal model is strictly better than the shared one. ``worst_decile``: mean
    over the worst tenth of the clients; both are of ``score`` (by default the kind's own), which not every client may have. The
    instance shares (both_correct, ...) are over all test rows.
    """
    score = score or kind_of(kind).score
    name = kind_of(kind).score.name
    rows = clients["rows"]
    personal = clients[f"{name}_personal"]
    shared = clients.get(f"{name}_global")
    out: dict[str, Any] = {
        f"{name}_personal": _mean(personal),
        f"{name}_global": _mean(shared),
        f"{name}_personal_weighted": float(np.average(personal, weights=rows)),
        f"{name}_global_weighted": None if shared is None else float(np.average(shared, weights=rows)),
        "share_benefit": None if shared is None else share_better(score, clients),
        "worst_decile": worst_decile(kind, clients[f"{score.name}_personal"], score),
        "deviation": _deviation(clients[f"{score.name}_personal"]),
        "loss_personal": _mean(clients["loss_personal"]),
        "loss_global": _mean(clients.get("loss_global")),
    }
    for other in dict.fromkeys(metric.name for every in KINDS.values() for metric in every.metrics[1:]):
        out |= {key: _mean(clients.get(key)) for key in (f"{other}_personal", f"{other}_global")}
    out |= {key: _mean(clients[key]) for key in clients if key.endswith(("_personal", "_global")) and key not in out}
    for share in ("both_correct", "global_only", "personal_only"):
        out[share] = float(np.average(clients[share], weights=rows)) if share in clients else None
    return out


def on_validation(kind: str, clients: Columns, score: Metric) -> dict[str, Any]:
    """Return what a summary says of validation rows: the kind's score, the one that was asked for, and the loss, which settles
    ties; and ``val_score``, which chooses: the score with the clients' weights in a verdict."""
    measured = summarize(kind, clients, score)
    names = dict.fromkeys((kind_of(kind).score.name, score.name, "loss"))
    means = {f"val_{key}": measured.get(key) for name in names for key in (f"{name}_personal", f"{name}_global")}
    return {**means, "val_score": weighted_mean(clients[f"{score.name}_personal"], clients["rows"])}


def judged_by(clients: Columns, score: Metric) -> Columns:
    """Each client's columns of validation that methods are chosen by, under the names they have beside those of the test rows."""
    return {f"val_{key}": clients[key] for key in ("rows", f"{score.name}_personal", "loss_personal")}


def weighted_mean(values: NDArray[np.float64], rows: NDArray[np.float64]) -> float | None:
    """Return the mean over the clients that have a score, with their weights in a verdict."""
    known = ~np.isnan(values)
    if not known.any():
        return None
    weights = client_weights(rows[known])
    return float(values[known].mean() if np.ptp(weights) == 0 else weights @ values[known])  # equal scores stay equal


def share_better(score: Metric, clients: Columns) -> float | None:
    """Return the share of clients, of those that have the score, whose personal model is strictly better than the shared one."""
    gains = score.gain(clients[f"{score.name}_personal"], clients[f"{score.name}_global"])
    known = gains[~np.isnan(gains)]
    return float(np.mean(known > 0)) if len(known) else None


def worst_decile(kind: str, personal: NDArray[np.float64], score: Metric | None = None) -> float | None:
    """Return the mean over the worst tenth of the clients that have the score."""
    ranked = np.sort(personal[~np.isnan(personal)])
    count = math.ceil(len(ranked) / 10)
    higher = (score or kind_of(kind).score).higher
    return float(np.mean(ranked[:count] if higher else ranked[-count:])) if count else None


def _deviation(values: NDArray[np.float64]) -> float | None:
    return None if np.isnan(values).all() else float(np.nanstd(values))


def _mean(values: NDArray[np.float64] | None) -> float | None:
    if values is None or np.isnan(values).all():
        return None
    return float(np.nanmean(values))
