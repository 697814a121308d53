"""Where the true parameters are known: distance to them, and the excess risk of MINIMAX (AER, IER).

IER_i is the risk of client i's model on its own test rows minus that of its true parameters; AER weighs them by p_i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import opened
from fedtailor.data.federation import Federation
from fedtailor.task import Task


def fits(task: Task, truth: Mapping[str, Tensor]) -> bool:
    """Say whether the truth is a model of this task. (A missing bias is zero.)"""
    start = tree.trainable(task.init())
    same = all(name in start and start[name].shape == leaf.shape for name, leaf in truth.items())
    return same and set(start) - set(truth) <= {"bias"}


def individual_excess_risk(task: Task, federation: Federation, losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """IER of each client from its test loss; the test rows stand for fresh data."""
    assert federation.truth is not None
    best = [float(task.risk(t, _test_batch(federation, i))) for i, t in enumerate(federation.truth)]  # type: ignore[arg-type]
    return losses - np.array(best)


def _test_batch(federation: Federation, client: int) -> Mapping[str, Tensor]:
    x, y = federation.test.client(client)
    return {"x": x, "y": y}


def distances(truth: Sequence[Mapping[str, Tensor]], shared: Any, personal: Sequence[Any]) -> dict[str, float | None]:
    """Mean squared distance of the personal models to the clients' truth, and of the shared model to the truth's mean.

    Null where a state holds no model of the truth's shape.
    """
    center = tree.map(lambda *leaves: torch.stack(leaves).mean(0), *truth)
    own = []
    for person, true in zip(personal, truth, strict=True):
        received, state = opened(shared, person)
        own.append(_distance(state.get("model", received.get("model")), true))
    known = [d for d in own if d is not None]
    return {
        "distance_personal": float(np.mean(known)) if len(known) == len(own) else None,
        "distance_global": _distance(shared.get("model"), center),
    }


def _distance(model: Any, truth: Mapping[str, Tensor]) -> float | None:
    if model is None:
        return None
    model = tree.trainable(model)
    if "bias" in model and "bias" not in truth and "weight" in truth:
        truth = {**truth, "bias": torch.zeros_like(model["bias"])}
    if tree.shapes(model).keys() != tree.shapes(truth).keys() or any(model[k].shape != truth[k].shape for k in model):
        return None
    return float(tree.dist2(model, {k: truth[k] for k in model}))
