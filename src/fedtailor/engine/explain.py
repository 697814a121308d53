"""``explain``: which columns a client's model rests on, and in which it differs from the shared one.

A column's importance is how much the loss on test rows grows when its values are dealt out anew among the client's rows,
mean over several deals. Every row gives one number, so that intervals are Student's over rows; whether a client differs from
the shared model is judged on the same rows and deals, at a level of 5 % for all of a client's columns together (Bonferroni).
Of linear models the coefficients stand beside it, of features as they were scaled: what a standard deviation of the column
adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.models.linear import Linear
from fedtailor.runs.models import Saved

DEALS = 20
MOST = 500  # columns
LEVEL = 0.05

Floats = NDArray[np.float64]


def explain(saved: Saved, federation: Federation, client: str | None = None, deals: int = DEALS) -> dict[str, Any]:
    """Return for every client (or one) the importance of each column, and its difference from that in the shared model.

    ``federation`` is the run's own, whose test rows are used.
    """
    if saved.tokens or federation.train.x.dim() != 2 or federation.train.x.shape[1] > MOST:
        raise ModelMismatch(f"explain is for rows of at most {MOST} columns; the model was trained on {saved.facts['shape']}")
    if deals < 1:
        raise InvalidArgument(f"deals={deals} must be at least 1")
    names = federation.names if client is None else (federation.names[federation.index(client)],)
    columns = _columns(saved, federation)
    clients = [_one(saved, federation, name, columns, deals) for name in names]
    return {"method": saved.facts["algorithm"], "loss": saved.task.kind.loss, "deals": deals, "clients": clients}


def _columns(saved: Saved, federation: Federation) -> dict[str, list[int]]:
    """Return the features of each column of the table; without one, each is its own."""
    if saved.schema is None:
        return {f"feature {i}": [i] for i in range(federation.train.x.shape[1])}
    out, at = {}, 0
    for column in saved.schema.columns:
        width = len(column.names())
        out[column.name] = list(range(at, at + width))
        at += width
    return out


def _one(saved: Saved, federation: Federation, client: str, columns: dict[str, list[int]], deals: int) -> dict[str, Any]:
    x, y = federation.test.client(federation.index(client))
    draw = rng.generator(0, f"explain {client}")
    places = torch.from_numpy(np.concatenate([draw.permutation(len(x)) for _ in range(deals)]))
    own_coefficients, shared_coefficients = coefficients(saved, client), coefficients(saved, None) if saved.has_shared else {}

    def rises(predict: Callable[[Tensor], Tensor]) -> Callable[[list[int]], Floats]:
        def loss(rows: Tensor) -> Floats:
            return saved.task.kind.example_loss(predict(rows), y.repeat(len(rows) // len(y))).double().numpy()

        before = loss(x)

        def of(features: list[int]) -> Floats:
            dealt = x.repeat(deals, 1)
            dealt[:, features] = x[places][:, features]
            return loss(dealt).reshape(deals, len(x)).mean(0) - before

        return of

    own = rises(lambda rows: saved.predict(client, rows))
    shared = rises(lambda rows: saved.predict(None, rows)) if saved.has_shared else None
    table = []
    for name, features in columns.items():
        mine = own(features)
        low, high = interval(mine)
        entry: dict[str, Any] = {"column": name, "importance": float(mine.mean()), "low": low, "high": high}
        if shared is not None:
            gap = mine - shared(features)
            low, high = interval(gap)
            sure = interval(gap, LEVEL / len(columns))
            differs = sure[0] is not None and sure[1] is not None and (sure[0] > 0 or sure[1] < 0)
            entry |= {"difference": float(gap.mean()), "difference_low": low, "difference_high": high, "differs": bool(differs)}
        if own_coefficients:
            labels = feature_names(saved, federation)
            entry["coefficients"] = {labels[i]: own_coefficients[i] for i in features}
            entry["shared_coefficients"] = {labels[i]: shared_coefficients[i] for i in features} if shared_coefficients else None
        table.append(entry)
    table.sort(key=lambda entry: -entry["importance"])
    return {"client": client, "rows": len(x), "columns": table}


def feature_names(saved: Saved, federation: Federation) -> list[str]:
    return saved.schema.names() if saved.schema is not None else [f"feature {i}" for i in range(federation.train.x.shape[1])]


def coefficients(saved: Saved, client: str | None) -> dict[int, Any]:
    """Return every feature's coefficient in a linear model: of two classes, in the log odds of the second; of more, one number
    per class, which sum to zero. Nothing for other models."""
    if saved.facts["model"] != Linear.__name__.lower():
        return {}
    try:
        weight = saved.weights(client)["weight"].double().numpy()
    except ModelMismatch:  # no single model predicts
        return {}
    if saved.task.kind.softmax and len(weight) == 2:
        return dict(enumerate((weight[1] - weight[0]).tolist()))
    if saved.task.kind.softmax:
        weight = weight - weight.mean(0)
    return dict(enumerate(weight[0].tolist() if len(weight) == 1 else weight.T.tolist()))


def interval(values: Floats, level: float = LEVEL) -> tuple[float | None, float | None]:
    """Return Student's interval of the mean; nothing for fewer than two numbers."""
    if len(values) < 2:
        return None, None
    mean, error = float(values.mean()), float(values.std(ddof=1)) / np.sqrt(len(values))
    reach = float(stats.t.ppf(1 - level / 2, len(values) - 1)) * error
    return float(mean - reach), float(mean + reach)


def in_words(explained: dict[str, Any], most: int = 5) -> list[str]:
    """Return a paragraph per client: what its model rests on, and where it differs from the shared one."""
    lines = []
    for entry in explained["clients"]:
        top = [_words(column) for column in entry["columns"][:most]]
        lines.append(f"{entry['client']} ({entry['rows']} test rows) rests on {'; '.join(top)}.")
        apart = [column for column in entry["columns"] if column.get("differs")]
        more = [c["column"] for c in apart if c["difference"] > 0]
        less = [c["column"] for c in apart if c["difference"] < 0]
        if apart:
            parts = [f"{word} on {', '.join(names)}" for word, names in (("more", more), ("less", less)) if names]
            lines.append(f"  It rests {' and '.join(parts)} than the shared model does.")
        elif entry["columns"] and "differs" in entry["columns"][0]:
            lines.append("  In no column does it surely differ from the shared model.")
    return lines


def _words(column: dict[str, Any]) -> str:
    within = "" if column["low"] is None else f" ({column['low']:.3f} to {column['high']:.3f})"
    return f"{column['column']} {column['importance']:.3f}{within}"
