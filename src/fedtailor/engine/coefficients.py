"""Coefficients of linear models and what the rows leave open of them.

The interval of a coefficient is that of a model fitted to the rows: inverse Hessian, the rows' squared gradients, inverse Hessian
(the sandwich, right also where noise differs from row to row), with Student's law. Where columns determine each other (all
categories of one) it is the interval of the smallest of the equally good fits, which descent from zero finds. A pull to another
model, or a descent that was ended early, is not in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedtailor.data.federation import Federation
from fedtailor.errors import ModelMismatch
from fedtailor.models.linear import Linear
from fedtailor.runs.models import Saved

LARGEST = 1000  # coefficients of all outputs together, beyond which no interval is given
TINY = 1e-9  # share of the largest curvature below which a direction is not determined

Floats = NDArray[np.float64]


def coefficients(saved: Saved, client: str | None) -> dict[int, Any]:
    """Return every feature's coefficient in a linear model: of two classes, in the log odds of the second; of more, one number
    per class, which sum to zero. Nothing for other models."""
    weight = _weight(saved, client)
    return {} if weight is None else _listed(_shown(saved, len(weight)) @ weight)


def intervals(saved: Saved, federation: Federation, client: str | None) -> dict[int, Any]:
    """Return (low, high) of every coefficient, in the order of ``coefficients``: a client's by its own training rows, the shared
    model's by everyone's, each client's together counting alike. Nothing where the rows are too few, or private."""
    kind, weight = saved.task.kind, _weight(saved, client)
    if weight is None or not (kind.softmax or kind.least_squares) or saved.algorithm.opt.privacy is not None:
        return {}
    train = federation.train
    rows = slice(None)
    counts = np.ones(len(train.y)) if train.weights is None else train.weights.numpy().astype(np.float64)
    if client is not None:
        place = federation.index(client)
        rows = slice(int(train.offsets[place]), int(train.offsets[place + 1]))
    elif saved.config.get("weights", "uniform") == "uniform":
        counts = counts * np.repeat(train.sizes.mean() / train.sizes, train.sizes)
    bias = saved.weights(client).get("bias")
    x = train.x[rows].double().numpy()
    model = weight if bias is None else np.column_stack([weight, bias.double().numpy()])
    x = x if bias is None else np.column_stack([x, np.ones(len(x))])
    estimate = sandwich(model, x, train.y[rows].numpy(), counts[rows], kind.softmax)
    if estimate is None:
        return {}
    covariance, freedom = estimate
    shown, features = _shown(saved, len(weight)), weight.shape[1]
    outputs, width = model.shape
    blocks = covariance.reshape(outputs, width, outputs, width)
    errors = np.sqrt(np.einsum("sa,ajbj,sb->sj", shown, blocks, shown).clip(min=0))[:, :features]
    reach, values = stats.t.ppf(0.975, freedom) * errors, shown @ weight
    low, high = _listed(values - reach), _listed(values + reach)
    return {i: [low[i], high[i]] for i in low}


def sandwich(model: Floats, x: Floats, y: NDArray[Any], counts: Floats, softmax: bool) -> tuple[Floats, float] | None:
    """Return the covariance of a fitted model [outputs, width], flattened, and its degrees of freedom; None where there are not
    more rows than directions, or too many coefficients. ``counts`` says how much each row counts."""
    outputs, width = model.shape
    if outputs * width > LARGEST:
        return None
    scores = x @ model.T
    if softmax:
        share = np.exp(scores - scores.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        slope = share - (y[:, None] == np.arange(outputs))
        pairs = [[share[:, a] * ((a == b) - share[:, b]) for b in range(outputs)] for a in range(outputs)]
    else:
        slope = scores - y.reshape(len(y), -1)
        pairs = [[np.full(len(y), float(a == b)) for b in range(outputs)] for a in range(outputs)]
    hessian = np.block([[(x * (counts * pair)[:, None]).T @ x for pair in line] for line in pairs])
    gradients = (slope[:, :, None] * x[:, None, :] * counts[:, None, None]).reshape(len(y), -1)
    rank, rows = int(np.linalg.matrix_rank(hessian, TINY * np.abs(hessian).max(), hermitian=True)), int((counts > 0).sum())
    if rows <= rank or rank == 0:
        return None
    inverse = np.linalg.pinv(hessian, TINY, hermitian=True)
    return inverse @ (gradients.T @ gradients) @ inverse * rows / (rows - rank), float(rows - rank)


def _weight(saved: Saved, client: str | None) -> Floats | None:
    """Return the weights of a linear model [outputs, features]; None of other models, and where no single model predicts."""
    if saved.facts["model"] != Linear.__name__.lower():
        return None
    try:
        weight: Floats = saved.weights(client)["weight"].double().numpy()
    except ModelMismatch:
        return None
    return weight


def _shown(saved: Saved, outputs: int) -> Floats:
    """Return how the coefficients that are shown are made of the outputs' [shown, outputs]."""
    if not saved.task.kind.softmax:
        return np.eye(outputs)
    return np.array([[-1.0, 1.0]]) if outputs == 2 else np.eye(outputs) - 1 / outputs


def _listed(values: Floats) -> dict[int, Any]:
    return dict(enumerate(values[0].tolist() if len(values) == 1 else values.T.tolist()))
