"""What a client says about its own linear fit: the parameters, and how uncertain they are; no row leaves it.

Least squares is unbiased and its noise known up to a scale. Softmax and logistic fits to few rows are neither: they come out too
long, and the usual covariance is off by some tens of per cent at five rows per parameter. So they are fitted with Jeffreys'
penalty (``theory/firth.py``), which takes the bias away to first order and keeps separable data finite, and their noise is
measured by fitting again to labels drawn at the client from its own fit, shortened to the length it has without noise.

Softmax parameters are compared up to a vector added to all classes, which changes no prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import block_diag, helmert
from scipy.special import log_softmax
from torch import Tensor

from fedtailor.data import rng
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.task import Task
from fedtailor.theory.firth import Numbers, maximize

PLENTY = 100  # rows per parameter from which on the textbook covariance is good to one per cent
DRAWS = 25  # fits to drawn labels: the mean over clients matters, so few do
LARGEST = 1000  # parameters: a covariance of more is too much to send
NOTHING = 1e-5  # singular values below this share of the largest are rounding of float32 rows


@dataclass(frozen=True, eq=False)
class Summary:
    """The summary that one client sends: its fit, the fit's covariance, and how well that is known; no data.

    ``variance`` is the variance of the fit's squared error minus ``noise``, ``square`` the trace of the covariance's square, both
    corrected for the covariance being an estimate itself.
    ``load`` is the number of parameters that the rows must pay for, ``rank`` of how many of the ``inputs`` they say anything;
    ``span`` is an orthonormal basis [inputs, rank] of the directions they say something of, None for all of them.
    """

    parameters: Numbers
    covariance: Numbers
    n: int
    load: int
    inputs: int
    rank: int
    variance: float
    square: float
    ridge: float = 0.0
    flags: tuple[str, ...] = ()
    name: str = ""
    span: Numbers | None = None

    @cached_property
    def noise(self) -> float:
        """The fit's expected squared error."""
        return float(np.trace(self.covariance))


class _Fit(NamedTuple):
    """Parameters [outputs, d], their covariance when flattened, and what ``Summary`` says about both."""

    parameters: Numbers
    covariance: Numbers
    variance: float
    square: float
    ridge: float = 0.0
    flags: tuple[str, ...] = ()


def summary(
    task: Task,
    x: Tensor | ArrayLike,
    y: Tensor | ArrayLike,
    *,
    name: str = "",
    draws: int = DRAWS,
    seed: int = 0,
    robust: bool = False,
) -> Summary:
    """Fit a linear task to one client's rows, and say how uncertain the fit is.

    ``robust`` takes the sandwich covariance, right also where the model is wrong (unequal noise, probabilities that are not of
    the model's form), at the price of more variance. Directions of which the rows say nothing (a constant column beside a bias,
    columns that depend on each other) stay at zero; the server takes them as common to all. With hardly more rows than inputs
    the fit is pulled to zero by a ridge as strong as one average row in every direction. ``flags`` says which of this happened.
    """
    if task.gradient is None:
        raise InvalidArgument("heterogeneity is estimated for the model 'linear'; take on_features(...) of another model first")
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
        raise InvalidArgument(f"draws must be a whole number of at least 2, not {draws!r}")
    start = task.init()
    outputs, inputs = start["weight"].shape
    rows = _rows(x, name, inputs, "bias" in start)
    softmax = task.kind.softmax
    targets = _targets(y, name, len(rows), softmax, outputs)
    size = (outputs - softmax) * rows.shape[1]
    if size > LARGEST:
        raise InvalidArgument(
            f"the model has {size} parameters, too many for a covariance (at most {LARGEST}); use fewer features, for "
            "instance principal components or on_features(...)"
        )
    basis, span = _basis(rows)
    d, r = basis.shape
    if r == 0:
        fit = _Fit(np.zeros((outputs - softmax, d)), np.zeros((size, size)), 0.0, 0.0)
    elif task.kind.least_squares:
        fit = _least_squares(rows @ basis, targets, basis, robust)
    else:
        generator = rng.generator(seed, "heterogeneity", rng.purpose(name))
        fit = (_softmax if softmax else _labels)(rows @ basis, targets, basis, generator, draws, robust)
    return Summary(
        parameters=fit.parameters.ravel(),
        covariance=fit.covariance,
        n=len(rows),
        load=(outputs - 1) * r if softmax else r,
        inputs=d,
        rank=r,
        variance=fit.variance,
        square=fit.square,
        ridge=fit.ridge,
        flags=fit.flags if r == d else (f"{d - r} of {d} input directions left at zero", *fit.flags),
        name=name,
        span=span,
    )


def _basis(rows: Numbers) -> tuple[Numbers, Numbers | None]:
    """[d, r] whose columns span what the rows know of: with Z = rows @ basis, which is orthogonal, w = basis @ (fit to Z).

    Columns are brought to one length first, so that no unit of measurement decides what counts as nothing. Of all w with the same
    fit it is the shortest in the features' own units, which are the same at every client. With it an orthonormal basis of these
    directions, None if they are all.
    """
    lengths = np.linalg.norm(rows, axis=0)
    lengths[lengths == 0] = 1.0
    _, values, turn = np.linalg.svd(rows / lengths, full_matrices=False)
    known = values > NOTHING * max(float(values[0]), np.finfo(float).tiny)
    basis = (turn[known] / lengths).T
    if known.all() and len(known) == rows.shape[1]:
        return basis, None
    span = np.linalg.qr((turn[known] * lengths).T)[0]  # of the rows themselves
    return span @ (span.T @ basis), span


def _transformed(covariance: Numbers, basis: Numbers) -> Numbers:
    """Return the covariance of basis @ v for each output, from that of the v."""
    d, r = basis.shape
    outputs = len(covariance) // r
    blocks = np.einsum("ir,arbs,js->aibj", basis, covariance.reshape(outputs, r, outputs, r), basis, optimize=True)
    return blocks.reshape(outputs * d, outputs * d)


def _rows(x: Tensor | ArrayLike, name: str, inputs: int, bias: bool) -> Numbers:
    rows = _array(x, "x", name)
    if rows.ndim < 2 or not len(rows) or rows[0].size != inputs:
        raise InvalidData(f"x of client {name or '?'} has shape {rows.shape}; give at least one row of {inputs} features")
    rows = rows.reshape(len(rows), inputs)
    return np.hstack([rows, np.ones((len(rows), 1))]) if bias else rows


def _targets(y: Tensor | ArrayLike, name: str, n: int, softmax: bool, outputs: int) -> Numbers:
    """Return targets as columns [n, outputs]; of classes, ones in the column of the class."""
    array = _array(y, "y", name)
    if array.ndim == 0 or len(array) != n:
        raise InvalidData(f"client {name or '?'} has {n} rows of x and y of shape {array.shape}; give one y per row")
    if not softmax:
        if array[0].size != outputs:
            raise InvalidData(f"y of client {name or '?'} has {array[0].size} numbers per row, the model {outputs}; give as many")
        return array.reshape(n, outputs)
    if array.ndim != 1 or (array % 1 != 0).any() or array.min() < 0 or array.max() >= outputs:
        raise InvalidData(f"y of client {name or '?'} holds other numbers than the classes 0 to {outputs - 1}; renumber them")
    return np.eye(outputs)[array.astype(np.int64)]


def _array(value: Tensor | ArrayLike, label: str, name: str) -> Numbers:
    try:
        array = np.array(value.detach().cpu().numpy() if isinstance(value, Tensor) else value, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidData(f"{label} of client {name or '?'} is not an array of numbers; give rows of equal length") from error
    if not np.isfinite(array).all():
        raise InvalidData(f"{label} of client {name or '?'} has a value that is not finite (NaN or infinity); fill or drop it")
    return array


def _ridge(Z: Numbers, curvature: float) -> tuple[float, tuple[str, ...]]:
    """Return how strong a ridge the rows need: as one average row in every direction where they hardly outnumber r, else none."""
    n, r = Z.shape
    if n >= 1.5 * r + 3:
        return 0.0, ()
    return curvature * float((Z**2).sum()) / n, (f"only {n} rows for {r} inputs: pulled to zero by a ridge",)


def _least_squares(Z: Numbers, Y: Numbers, basis: Numbers, robust: bool) -> _Fit:
    lam, flags = _ridge(Z, 1.0)
    moment = Z.T @ Z
    inverse = np.linalg.inv(moment + lam * np.eye(len(moment)))
    coefficients = inverse @ Z.T @ Y  # [r, outputs]
    shrinkage = inverse @ moment
    free = max(len(Z) - 2 * np.trace(shrinkage) + np.trace(shrinkage @ shrinkage), 1e-9)  # of the residuals, also with a ridge
    residuals = Y - Z @ coefficients
    sigma = residuals.T @ residuals / free
    shape = shrinkage @ inverse
    covariance = np.kron(sigma, shape)
    certainty = free / (free + 2)  # a squared estimate of a variance is too large by this
    doubt = 2 * float((sigma**2).sum()) / free * certainty * float(np.trace(_transformed(shape, basis))) ** 2
    if robust:
        leverage = np.minimum((Z @ inverse * Z).sum(1), 1 - 1e-6)
        covariance = _sandwich(np.kron(np.eye(Y.shape[1]), inverse), Z, residuals / np.sqrt(1 - leverage)[:, None])
    covariance = _transformed(covariance, basis)
    square = float((covariance**2).sum()) * certainty
    return _Fit((basis @ coefficients).T, covariance, 2 * square + doubt, square, lam, flags)


def _sandwich(bread: Numbers, Z: Numbers, residuals: Numbers) -> Numbers:
    scores = np.einsum("na,nr->nar", residuals, Z).reshape(len(Z), -1)
    return bread @ (scores.T @ scores) @ bread


def _labels(Z: Numbers, Y: Numbers, basis: Numbers, generator: np.random.Generator, draws: int, robust: bool) -> _Fit:
    """Return one logistic fit per label; z of a label is sqrt(2) times the contrast of a softmax over (0, z)."""
    parts = [_softmax(Z, np.stack([y, 1 - y], 1), basis, generator, draws, robust) for y in Y.T]
    return _Fit(
        np.sqrt(2) * np.concatenate([part.parameters for part in parts]),
        2 * block_diag(*(part.covariance for part in parts)),
        4 * sum(part.variance for part in parts),
        4 * sum(part.square for part in parts),
        max(part.ridge for part in parts),
        tuple(dict.fromkeys(flag for part in parts for flag in part.flags)),
    )


def _softmax(Z: Numbers, Y: Numbers, basis: Numbers, generator: np.random.Generator, draws: int, robust: bool) -> _Fit:
    """Parameters in orthonormal contrasts of the classes, so that distances are those of weights that sum to zero over them."""
    outputs = Y.shape[1]
    contrasts = helmert(outputs).T  # [outputs, outputs - 1]
    lam, flags = _ridge(Z, 0.5)  # 1/2: the largest curvature of a softmax
    start = np.zeros((1, outputs - 1, Z.shape[1]))
    fits, covariances = maximize(Z, Y[None], contrasts, start, lam)
    logits = Z @ fits[0].T @ contrasts.T
    absent = int((Y.sum(0) == 0).sum())
    if absent:
        flags += (f"{absent} of {outputs} classes without a row",)
    elif bool((logits.argmax(1) == Y.argmax(1)).all()):
        flags += ("every row fitted (separable): only the penalty keeps the fit finite",)
    covariance = covariances[0]
    if robust:
        excess = (Y - np.exp(log_softmax(logits, 1))) @ contrasts
        covariance = _sandwich(covariance, Z, excess) * len(Z) / max(len(Z) - Z.shape[1], 1)
    covariance, parameters = _transformed(covariance, basis), fits[0] @ basis.T
    square = float((covariance**2).sum())
    if lam or len(Z) >= PLENTY * len(covariances[0]):
        return _Fit(parameters, covariance, 2 * square, square, lam, flags)
    errors, traces = _refit(Z, fits[0], covariances[0], contrasts, basis, generator, draws)
    scale = float(errors.mean() / traces.mean())
    variance = float((errors - scale * traces).var(ddof=1)) * (1 + 1 / draws)
    certainty = float(traces.mean() ** 2 / (traces**2).mean())  # a guess that swings by itself is too large once squared
    return _Fit(parameters, scale * covariance, variance, square * scale**2 * certainty, lam, flags)


def _refit(
    Z: Numbers, fit: Numbers, covariance: Numbers, contrasts: Numbers, basis: Numbers, generator: np.random.Generator, draws: int
) -> tuple[Numbers, Numbers]:
    """Return squared errors of fits to labels drawn from the client's own fit, and the traces of their textbook covariances.

    The fit is shortened first: its logits hold the noise of the fit, and labels from longer logits would be less noisy to fit
    than the client's own.
    """
    free, r = fit.shape
    summed = np.einsum("aras->rs", covariance.reshape(free, r, free, r))
    squared = float(((Z @ fit.T) ** 2).sum())
    share = max(0.0, 1 - float((Z.T @ Z * summed).sum()) / squared) if squared > 0 else 0.0
    center = np.sqrt(share) * fit
    logits = Z @ center.T @ contrasts.T
    # the largest of logits and Gumbel noise is a draw from the softmax
    labels = (logits + generator.gumbel(size=(draws, *logits.shape))).argmax(2)
    at_once = max(1, 4_000_000 // (Z.size * free))
    errors, traces = [], []
    for first in range(0, draws, at_once):
        one_hot = np.eye(logits.shape[1])[labels[first : first + at_once]]
        starts = np.broadcast_to(center, (len(one_hot), *center.shape))
        fits, covariances = maximize(Z, one_hot, contrasts, starts, 0.0, 1e-4)
        errors.append((((fits - center) @ basis.T) ** 2).sum((1, 2)))
        traces.append(np.einsum("baras,rs->b", covariances.reshape(-1, free, r, free, r), basis.T @ basis))
    return np.concatenate(errors), np.concatenate(traces)
