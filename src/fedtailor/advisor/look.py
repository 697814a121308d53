"""How far apart the clients are, and what theory makes of it: one exchange of fitted parameters, no training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fedtailor.data.federation import Federation
from fedtailor.errors import FedtailorError
from fedtailor.task import Task
from fedtailor.theory import clusters, heterogeneity
from fedtailor.theory.fits import Summary
from fedtailor.theory.heterogeneity import Heterogeneity

LARGEST = 150  # parameters of the clients' own fits: with more, their covariances take longer than the race
ENOUGH = heterogeneity.ENOUGH


@dataclass(frozen=True, eq=False)
class Look:
    """The result of the exchange. ``groups`` has the group of every client (empty: no groups; -1: too little data to tell)."""

    heterogeneity: Heterogeneity | None = None
    groups: tuple[int, ...] = ()
    inside: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def k(self) -> int:
        return max(self.groups) + 1 if self.groups else 1


def look(task: Task, federation: Federation, shared: Mapping[str, Tensor], seed: int) -> Look:
    """Estimate how far apart the clients are: on their rows for a linear model, otherwise in the last layer of the network
    ``shared``; on random directions of the features where there are too many of them."""
    notes: list[str] = []
    seen, linear = federation, task
    try:
        if task.gradient is None:
            seen = heterogeneity.on_features(task, shared, federation)
            notes.append(
                "How far the clients are apart is measured in the last layer, on the features that a short FedAvg learned."
            )
        outputs = max(1, seen.outputs - seen.kind.softmax)
        features = int(np.prod(seen.train.x.shape[1:]))
        if features * outputs > LARGEST:
            rows = float(np.median(seen.train.sizes))
            directions = int(np.clip(min(LARGEST, rows / ENOUGH) / outputs, 2, features))
            if directions * outputs > LARGEST:
                notes.append(
                    f"The spread is not estimated: {outputs + 1} classes are too many for the fits; the race decides alone."
                )
                return Look(notes=tuple(notes))
            seen = heterogeneity.projected(seen, directions, seed)
            notes.append(
                f"The spread is of a model on {directions} random directions of the {features} features: a fit of all would take "
                f"{features * outputs} parameters."
            )
        if seen is not federation:
            linear = heterogeneity.linear_task(seen)
        received = heterogeneity.summaries(linear, seen, seed=seed)
        estimate = heterogeneity.estimate(received)
        groups = clusters.find(received, seed=seed)
    except FedtailorError as error:
        return Look(notes=(*notes, f"The spread could not be estimated: {error}."))
    if estimate.trusted:
        notes.append(estimate.trusted)
    if groups.k == 1:
        return Look(estimate, notes=tuple(notes))
    group_of = dict(zip(groups.names, groups.labels, strict=True))
    labels = tuple(int(group_of.get(name, -1)) for name in federation.names)
    return Look(estimate, labels, _inside(task, federation, received, labels), tuple(notes))


def _inside(
    task: Task, federation: Federation, received: Sequence[Summary], labels: Sequence[int]
) -> tuple[Mapping[str, Any], ...]:
    """Return, for every group, its clients, how far apart they are among themselves, and how much pooling that asks for."""
    out = []
    for group in range(max(labels) + 1):
        members = [i for i, label in enumerate(labels) if label == group]
        entry: dict[str, Any] = {"clients": [federation.names[i] for i in members]}
        if len(members) > 1:
            estimate = heterogeneity.estimate([received[i] for i in members])
            lam = pull(estimate, federation.take(members), task, 0.0 if estimate.zero else estimate.r2)
            entry |= {"spread": estimate.r2, "r2": estimate.r2, "interval": list(estimate.interval), "zero": estimate.zero}
            entry["lam"] = None if np.isinf(lam) else lam  # None: one model for the group
        out.append(entry)
    return tuple(out)


def pull(estimate: Heterogeneity, federation: Federation, task: Task, r2: float) -> float:
    """Return the lam that partial pooling asks for: (noise of a record) d / (n R^2).

    A client's fit scatters about its truth with the covariance (dispersion / n) H^-1, the truths about their mean with R^2 / d in
    each direction; the posterior mean is the minimiser of the risk + lam/2 |w - g|^2 with this lam, whatever the curvature H.
    """
    dispersion = heterogeneity.residual_variance(federation) if task.kind.least_squares else 1.0
    return pull_of(estimate, federation.train.sizes, dispersion, r2)


def pull_of(estimate: Heterogeneity, sizes: Any, dispersion: float, r2: float) -> float:
    """Return the same from what clients say of themselves: how many rows they have, and the variance of a row about their
    fits."""
    if r2 <= 0:
        return float("inf")
    n = float(1 / np.mean(1 / np.asarray(sizes, np.float64)))
    return float(dispersion * (estimate.load or estimate.d) / (n * r2))


def pulls(lam: float, federation: Federation) -> dict[str, float]:
    """Return a lam for every client that is ``lam`` overall: fewer rows, more pull."""
    sizes = federation.train.sizes
    each = lam / (sizes * np.mean(1 / sizes))
    return dict(zip(federation.names, each.tolist(), strict=True))
