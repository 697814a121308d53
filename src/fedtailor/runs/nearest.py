"""Whose rows are most like a stranger's: the model of that client predicts where a method has no shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.federation import Federation
from fedtailor.data.schema import Schema

Numbers = NDArray[np.float64]


def middles(federation: Federation) -> dict[str, Any]:
    """Return the mean of every client's training rows, by feature, and the deviation of all of them, as a run keeps it: features
    are as those of a stranger, scaled by everyone's rows."""
    train, schema = federation.train, federation.schema
    assert schema is not None
    sums = np.add.reduceat(train.x.numpy().astype(np.float64), train.offsets[:-1])
    means = _as_pooled(sums / train.sizes[:, None], schema, federation.names)
    spread = train.x.numpy().std(0, dtype=np.float64)
    if schema.clients:  # their own scales are gone in the pooled ones, where numbers have a deviation of about 1
        spread = np.ones_like(spread)
    return {"means": means.tolist(), "spread": np.where(spread > 0, spread, 1.0).tolist()}


def _as_pooled(means: Numbers, schema: Schema, names: tuple[str, ...]) -> Numbers:
    """Return means of features that were scaled by the clients' own rows, where they were, as the scale of all has them."""
    at, out = 0, means.copy()
    for place, column in enumerate(schema.columns):
        if schema.clients and column.kind in ("numeric", "date"):
            own = np.array([schema.clients[name][place] for name in names])
            out[:, at] = (means[:, at] * own[:, 1] + own[:, 0] - column.mean) / column.scale
        at += len(column.names())
    return out


def nearest(known: Mapping[str, Any], clients: list[str], x: Any) -> str:
    """Return the client whose mean row is nearest to that of rows x, in standard deviations of the features."""
    gap = (np.asarray(known["means"]) - np.asarray(x, np.float64).mean(0)) / np.asarray(known["spread"])
    return clients[int((gap**2).sum(1).argmin())]
