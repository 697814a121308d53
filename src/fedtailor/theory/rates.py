"""Step sizes and rates that CLUP proves, and the constants that PARTIAL's theorems ask for."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument
from fedtailor.local import gradient_on
from fedtailor.task import Task


class Steps(NamedTuple):
    lr: float
    server_lr: float
    steps: int


def fedclup_steps(lam: float, mu: float, smoothness: float) -> Steps:
    """CLUP Corollary 2: eta = 1/(lam + L), gamma = (lam + L)/(2 lam L), K >= 2 + (lam + L)/(lam + mu) log(1056 kappa^2)."""
    if lam <= 0:
        raise InvalidArgument("steps='theory' needs lam > 0 (with lam = 0 nothing is shared; use Local)")
    kappa = smoothness / mu
    local = 2 + (lam + smoothness) / (lam + mu) * math.log(1056 * kappa**2)
    return Steps(1 / (lam + smoothness), (lam + smoothness) / (2 * lam * smoothness), math.ceil(local))


def fedclup_rate(lam: float, mu: float, smoothness: float) -> float:
    """CLUP Corollary 2: the factor by which the squared error of g falls per round."""
    return 1 - (lam + smoothness) / (4 * smoothness / mu * (lam + mu))


# -- PARTIAL's constants for a model that is linear in (u, v) ------------------------------------------------------------------
class Split(NamedTuple):
    """The constants that PARTIAL's theorems ask for, of a problem with a shared part u and a personal part v.

    ``b2`` and the variances hold at every point; they are infinite for least squares, whose gradients have no bound (a variance
    is 0 with full batches).
    """

    L: float
    gap: float
    start2: float
    sigma_u2: float
    sigma_v2: float
    b2: float


def split_constants(
    task: Task, federation: Federation, mine: Collection[str], batch_size: int | None = None, weight_decay: float = 0.0
) -> Split:
    """Return the constants for the personal part ``mine``, for the models ``linear`` and ``split-linear``.

    With rows a (that meet u) and b (that meet v), L = curvature * max over clients of the larger of |A'A/n| and |B'B/n|: the
    Hessian is positive semi-definite, so its mixed block is never larger. The loss is at least 0, so f at the start serves as
    ``gap``. A row's gradient in u is at most slope |a|; b^2 is bounded by the clients' mean square of that, a batch's variance by
    the rows' mean square over the size of the smallest batch. Batches are taken as independent draws, as in the paper (ours are
    without replacement within an epoch).
    """
    curvature, slope2 = _loss_bounds(task, federation)
    start = task.init()
    largest = {"u": 0.0, "v": 0.0}
    noise = {"u": 0.0, "v": 0.0}
    gap = start2 = b2 = 0.0
    for i in range(len(federation)):
        x, y = federation.train.client(i)
        columns = _columns(task, x) or {}
        parts = {
            "u": _joined([c for name, c in columns.items() if name not in mine], x),
            "v": _joined([c for name, c in columns.items() if name in mine], x),
        }
        for part, rows in parts.items():
            if not rows.shape[1]:
                continue
            largest[part] = max(largest[part], float(torch.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]))
            if batch_size is not None and len(y) > batch_size:
                least = len(y) % batch_size or batch_size
                noise[part] = max(noise[part], slope2 * float((rows**2).sum(1).mean()) / least)
        if parts["u"].shape[1]:
            b2 += slope2 * float(parts["u"].norm(dim=1).mean()) ** 2 / len(federation)
        batch = {"x": x, "y": y}
        slope = tree.add(gradient_on(task.risk, start, batch), start, weight_decay)
        start2 += float(sum((g.double() ** 2).sum() for g in tree.drop(slope, mine).values())) / len(federation)
        gap += float(task.risk(start, batch)) / len(federation)
    gap += weight_decay / 2 * float(sum((w.double() ** 2).sum() for w in start.values()))
    return Split(curvature * max(largest.values()) + weight_decay, gap, start2, noise["u"], noise["v"], b2)


def _loss_bounds(task: Task, federation: Federation) -> tuple[float, float]:
    """Return (largest curvature, largest squared slope) of the loss in the logits. Refuse a model that is not linear."""
    x = federation.train.x[:8]
    columns = _columns(task, x)
    if columns is not None:
        draw = torch.Generator().manual_seed(0)
        point = {name: torch.randn(w.shape, generator=draw, dtype=torch.float64).to(w) for name, w in task.init().items()}
        expected = sum(c @ point[name].double().reshape(len(point[name]), -1).T for name, c in columns.items())
        with torch.no_grad():
            logits = task.apply(point, x).double()
        split = "common.weight" in columns
        if torch.allclose(logits[:, 1:] - logits[:, :1] if split else logits, torch.as_tensor(expected), rtol=1e-4, atol=1e-4):
            if split:
                return 0.25, 1.0  # one logit
            outputs = task.kind.averaged(federation.outputs)
            return task.kind.curvature / outputs, task.kind.slope2 / outputs
    raise InvalidArgument(
        "lr='theory' needs the smoothness of the risks, known for the models 'linear' and 'split-linear' only; give lr a number"
    )


def _columns(task: Task, x: Tensor) -> dict[str, Tensor] | None:
    """Return for each parameter the columns of the rows that it multiplies; None for a model of another shape."""
    rows, start = x.flatten(1).double(), task.init()
    names = set(start)
    if "weight" in names <= {"weight", "bias"} and start["weight"].shape[1:] == rows.shape[1:]:
        return {name: rows if name == "weight" else rows.new_ones(len(rows), 1) for name in start}
    if names == {"common.weight", "features.weight"}:
        first = start["common.weight"].shape[1]
        return {"common.weight": rows[:, :first], "features.weight": rows[:, first:]}
    return None


def _joined(columns: list[Tensor], x: Tensor) -> Tensor:
    return torch.cat(columns, 1) if columns else x.new_zeros(len(x), 0, dtype=torch.float64)
