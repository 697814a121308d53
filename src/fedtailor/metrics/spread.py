"""From per-client measures to a summary: means, who benefits, the worst decile, the spread over clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.metrics.client import score_name

Columns = Mapping[str, NDArray[np.float64]]


def summarize(kind: str, clients: Columns) -> dict[str, Any]:
    """Plain means over clients (and, as ``*_weighted``, by test rows); null where a measure does not apply.

    ``share_benefit``: share of clients whose personal model is strictly better than the shared one. ``worst_decile``: mean
    over the worst tenth of the clients. The instance shares (both_correct, ...) are over all test rows.
    """
    name = score_name(kind)
    rows = clients["rows"]
    personal = clients[f"{name}_personal"]
    shared = clients.get(f"{name}_global")
    out: dict[str, Any] = {
        f"{name}_personal": _mean(personal),
        f"{name}_global": _mean(shared),
        f"{name}_personal_weighted": float(np.average(personal, weights=rows)),
        f"{name}_global_weighted": None if shared is None else float(np.average(shared, weights=rows)),
        "share_benefit": None if shared is None else float(np.mean(gain(kind, clients) > 0)),
        "worst_decile": worst_decile(kind, personal),
        "deviation": float(np.std(personal)),
        "loss_personal": _mean(clients["loss_personal"]),
        "loss_global": _mean(clients.get("loss_global")),
        "auc_personal": _mean(clients.get("auc_personal")),
        "auc_global": _mean(clients.get("auc_global")),
    }
    for share in ("both_correct", "global_only", "personal_only"):
        out[share] = float(np.average(clients[share], weights=rows)) if share in clients else None
    return out


def gain(kind: str, clients: Columns) -> NDArray[np.float64]:
    """How much better each client's personal model is than the shared one (positive is better)."""
    name = score_name(kind)
    apart = clients[f"{name}_personal"] - clients[f"{name}_global"]
    return -apart if kind == "regression" else apart


def worst_decile(kind: str, personal: NDArray[np.float64]) -> float:
    count = math.ceil(len(personal) / 10)
    ranked = np.sort(personal)
    return float(np.mean(ranked[-count:] if kind == "regression" else ranked[:count]))


def _mean(values: NDArray[np.float64] | None) -> float | None:
    if values is None or np.isnan(values).all():
        return None
    return float(np.nanmean(values))
