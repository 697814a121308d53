"""``explain``: which columns a client's model rests on, and in which it differs from the shared one.

A column's importance is how much the loss on test rows grows when its values are dealt out anew among the client's rows,
mean over several deals. Every row gives one number, so that intervals are Student's over rows; whether a client differs from
the shared model is judged on the same rows and deals, at a level of 5 % for all of a client's columns together (Bonferroni).
Of linear models the coefficients stand beside it, of features as they were scaled: what a standard deviation of the column
adds, with intervals (``coefficients``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.engine.coefficients import coefficients, intervals
from fedtailor.errors import InvalidArgument, ModelMismatch
from fedtailor.runs.models import Saved

DEALS = 20
MOST = 500  # columns
LEVEL = 0.05
CLIENTS, WIDEST, ROWS = 8, 60, 500  # of a report: clients, columns, and test rows of each

Floats = NDArray[np.float64]


def explain(
    saved: Saved,
    federation: Federation,
    client: str | Sequence[str] | None = None,
    deals: int = DEALS,
    most_rows: int | None = None,
) -> dict[str, Any]:
    """Return for every client (or some) the importance of each column, and its difference from that in the shared model.

    ``federation`` is the run's own, whose test rows are used: of each client all, or ``most_rows`` of them. Of linear models the
    coefficients have intervals by the training rows.
    """
    if saved.tokens or federation.train.x.dim() != 2 or federation.train.x.shape[1] > MOST:
        raise ModelMismatch(f"explain is for rows of at most {MOST} columns; the model was trained on {saved.facts['shape']}")
    if deals < 1:
        raise InvalidArgument(f"deals={deals} must be at least 1")
    asked = [client] if isinstance(client, str) else client
    names = federation.names if asked is None else [federation.names[federation.index(name)] for name in asked]
    columns, shared = _columns(saved, federation), None
    if saved.has_shared:
        shared = coefficients(saved, None), intervals(saved, federation, None)
    clients = [_one(saved, federation, name, columns, (deals, most_rows)) for name in names]
    for entry in clients:
        _add_coefficients(entry, saved, federation, columns, shared)
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


def _one(
    saved: Saved, federation: Federation, client: str, columns: dict[str, list[int]], much: tuple[int, int | None]
) -> dict[str, Any]:
    x, y = federation.test.client(federation.index(client))
    draw = rng.generator(0, f"explain {client}")
    deals, most = much
    if most is not None and len(y) > most:
        some = torch.from_numpy(np.sort(draw.permutation(len(y))[:most]))
        x, y = x[some], y[some]
    places = torch.from_numpy(np.concatenate([draw.permutation(len(x)) for _ in range(deals)]))

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
        table.append(entry)
    table.sort(key=lambda entry: -entry["importance"])
    return {"client": client, "rows": len(x), "columns": table}


def _add_coefficients(
    entry: dict[str, Any],
    saved: Saved,
    federation: Federation,
    columns: dict[str, list[int]],
    shared: tuple[dict[int, Any], dict[int, Any]] | None,
) -> None:
    """Put the coefficients of a linear model and their intervals into what is said of a client's columns. Where all clients have
    the shared model, its interval is theirs."""
    own = coefficients(saved, entry["client"])
    if not own:
        return
    labels = feature_names(saved, federation)
    within = shared[1] if shared is not None and saved.algorithm.stateless else intervals(saved, federation, entry["client"])

    def named(values: dict[int, Any], features: list[int]) -> dict[str, Any] | None:
        return {labels[i]: values[i] for i in features} if values else None

    for column in entry["columns"]:
        features = columns[column["column"]]
        column["coefficients"], column["coefficient_intervals"] = named(own, features), named(within, features)
        column["shared_coefficients"] = None if shared is None else named(shared[0], features)
        column["shared_coefficient_intervals"] = None if shared is None else named(shared[1], features)


def feature_names(saved: Saved, federation: Federation) -> list[str]:
    return saved.schema.names() if saved.schema is not None else [f"feature {i}" for i in range(federation.train.x.shape[1])]


def interval(values: Floats, level: float = LEVEL) -> tuple[float | None, float | None]:
    """Return Student's interval of the mean; nothing for fewer than two numbers."""
    if len(values) < 2:
        return None, None
    mean, error = float(values.mean()), float(values.std(ddof=1)) / np.sqrt(len(values))
    reach = float(stdtrit(len(values) - 1, 1 - level / 2)) * error
    return float(mean - reach), float(mean + reach)


def for_report(saved: Saved, federation: Federation) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what the report of a run shows, and its words: of linear models of a table's columns, for the clients with most test
    rows; nothing else, and nothing of private runs."""
    private = saved.algorithm.opt.privacy is not None or saved.config.get("user_clip") is not None
    plain = saved.facts["model"] == "linear" and saved.schema is not None and federation.train.x.dim() == 2
    if (
        private
        or not plain
        or federation.shards is not None
        or federation.train.x.shape[1] > WIDEST
        or len(federation.train.y) == 0
    ):
        return None, []
    sizes = federation.test.sizes
    known = [i for i in np.argsort(-sizes, kind="stable")[:CLIENTS] if sizes[i] > 0 and federation.names[i] in saved.personal]
    if not known:
        return None, []
    explained = explain(saved, federation, [federation.names[i] for i in sorted(known)], DEALS, ROWS)
    lines = in_words(explained)
    if len(known) < len(federation):
        lines.append(f"Shown are the {len(known)} clients with most test rows; fedtailor explain has them all.")
    return explained, lines


def in_words(explained: dict[str, Any], most: int = 5) -> list[str]:
    """Return a paragraph per client: what its model rests on, and where it differs from the shared one."""
    lines = []
    for entry in explained["clients"]:
        who, columns = f"{entry['client']} ({entry['rows']} test rows)", entry["columns"]
        sure = [_words(column) for column in columns if column["low"] is None or column["low"] > 0]
        if sure or not columns:
            lines.append(f"{who} rests on {'; '.join(sure[:most])}.")
        else:
            lines.append(f"{who} surely rests on no column, most on {_words(columns[0])}.")
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
    within = "" if column["low"] is None else f" ({_short(column['low'])} to {_short(column['high'])})"
    return f"{column['column']} {_short(column['importance'])}{within}"


def _short(value: float) -> str:
    return f"{round(value, 3) + 0.0:.3f}"  # 0 in place of -0
