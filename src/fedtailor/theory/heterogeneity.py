"""How far apart the clients' true parameters are, from one exchange: R^2, the mean squared distance to their mean.

Each client fits a linear model to its own training rows and sends the fit and how uncertain it is (``summary``); no row leaves
it. The server compares the spread of the fits with the spread that noise alone makes (``estimate``):

    R^2 = mean |w_i - mean w|^2 of the fits - (1 - 1/m) mean trace(V_i),    V_i the covariance of client i's fit,

which is unbiased for *these* m clients; for a population they are drawn from it is m/(m - 1) times that. The interval inverts a
test: R^2 is in it unless the spread seen is in a tail of what R^2 would give. The spread is taken as a multiple of a chi-square
with its mean and variance, to which the noise, the true differences and the guess of the noise all contribute.

Least squares is unbiased and its noise known up to a scale. Softmax and logistic fits to few rows are neither: they come out too
long, and the usual covariance is off by some tens of per cent at five rows per parameter. So they are fitted with Jeffreys'
penalty (Firth's correction), which takes the bias away to first order and keeps separable data finite, and their noise is
measured by fitting again to labels drawn at the client from its own fit, shortened to the length it has without noise.

Softmax parameters are compared up to a vector added to all classes, which changes no prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import block_diag, helmert
from scipy.optimize import brentq
from scipy.special import gammainc, gammaincc, log_softmax
from torch import Tensor

from fedtailor import models
from fedtailor.data import rng
from fedtailor.data.federation import Federation, Split
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.task import Task
from fedtailor.task.losses import BY_KIND

Numbers = NDArray[np.float64]

TAIL = 0.05  # on either side of the 90 % interval
ENOUGH = 5  # rows per parameter from which on the interval was measured to hold
PLENTY = 100  # rows per parameter from which on the textbook covariance is good to one per cent
DRAWS = 25  # fits to drawn labels: the mean over clients matters, so few do
LARGEST = 1000  # parameters: a covariance of more is too much to send
NOTHING = 1e-5  # singular values below this share of the largest are rounding of float32 rows


@dataclass(frozen=True, eq=False)
class Summary:
    """What one client sends: its fit, the covariance of the fit, and how well that is known; no data.

    ``variance`` is the variance of the fit's squared error minus ``noise``, ``square`` the trace of the covariance's square, both
    corrected for the covariance being an estimate itself.
    ``load`` is the number of parameters that the rows must pay for, ``rank`` of how many of the ``inputs`` they say anything.
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

    @cached_property
    def noise(self) -> float:
        """The fit's expected squared error."""
        return float(np.trace(self.covariance))


@dataclass(frozen=True)
class Distance:
    """A client's squared distance to the mean, debiased (``r2`` is cut at 0), with its 90 % interval."""

    name: str
    r2: float
    low: float
    high: float
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Heterogeneity:
    """R^2 of m clients with its 90 % interval.

    ``r2`` is ``unbiased`` cut at 0, ``population`` the same for the population the clients come from. ``noise`` is the mean
    squared error of a client's fit, ``zero`` says that R^2 cannot be told from 0, ``trusted`` how far to believe all this. ``n``
    is the smallest number of rows, ``d`` the number of parameters; ``left_out`` names the clients that R^2 is not about.
    """

    r2: float
    interval: tuple[float, float]
    noise: float
    zero: bool
    per_client: tuple[Distance, ...]
    trusted: str
    n: int
    d: int
    m: int
    unbiased: float
    population: float
    left_out: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        return {
            "r2": self.r2,
            "interval": list(self.interval),
            "noise": self.noise,
            "zero": self.zero,
            "trusted": self.trusted,
            "n": self.n,
            "d": self.d,
            "m": self.m,
            "unbiased": self.unbiased,
            "population": self.population,
            "left_out": list(self.left_out),
            "per_client": [
                {"name": c.name, "r2": c.r2, "interval": [c.low, c.high], "flags": list(c.flags)} for c in self.per_client
            ],
        }


# -- the whole way --------------------------------------------------------------------------------------------------------
def measure(task: Task, federation: Federation, *, draws: int = DRAWS, seed: int = 0, robust: bool = False) -> Heterogeneity:
    """R^2 of a federation from its training rows: ``estimate`` of every client's ``summary``."""
    return estimate(summaries(task, federation, draws=draws, seed=seed, robust=robust))


def summaries(
    task: Task, federation: Federation, *, draws: int = DRAWS, seed: int = 0, robust: bool = False
) -> tuple[Summary, ...]:
    """Every client's ``summary``, from its training rows."""
    return tuple(
        summary(task, *federation.train.client(i), name=name, draws=draws, seed=seed, robust=robust)
        for i, name in enumerate(federation.names)
    )


def on_features(task: Task, params: Mapping[str, Tensor], federation: Federation) -> Federation:
    """The federation as the last layer of a network sees it: features in place of rows, labels kept.

    R^2 of the last layer is then ``measure(linear_task(fed), fed)``.
    """
    if task.features is None:
        raise InvalidArgument("the model has no last layer to take features before; name one with groups={'head': ...}")
    head = task.features

    def rows(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([head(dict(params), part).flatten(1).detach() for part in x.split(1024)])

    def split(s: Split) -> Split:
        return Split(rows(s.x), s.y, s.offsets)

    return replace(
        federation,
        train=split(federation.train),
        test=split(federation.test),
        val=None if federation.val is None else split(federation.val),
        public=None if federation.public is None else rows(federation.public),
        truth=None,
        schema=None,
        recipe=None,
    )


def linear_task(federation: Federation, *, bias: bool = True) -> Task:
    """The linear model of a federation's rows, as a task."""
    module = models.build("linear", tuple(federation.train.x.shape[1:]), federation.outputs, bias=bias)
    return Task.from_module(module.double(), BY_KIND[federation.kind].name, classes=federation.labels)


# -- at the client --------------------------------------------------------------------------------------------------------
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
    columns that depend on each other) stay at zero. With hardly more rows than inputs the fit is pulled to zero by a ridge as
    strong as one average row in every direction. ``flags`` says which of this happened.
    """
    if task.gradient is None:
        raise InvalidArgument("heterogeneity is estimated for the model 'linear'; take on_features(...) of another model first")
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
        raise InvalidArgument(f"draws must be a whole number of at least 2, not {draws!r}")
    start = task.init()
    outputs, inputs = start["weight"].shape
    rows = _rows(x, name, inputs, "bias" in start)
    targets = _targets(y, name, len(rows), task.kind, outputs)
    softmax = task.kind == "classification"
    size = (outputs - softmax) * rows.shape[1]
    if size > LARGEST:
        raise InvalidArgument(
            f"the model has {size} parameters, too many for a covariance (at most {LARGEST}); use fewer features, for "
            "instance principal components or on_features(...)"
        )
    basis = _basis(rows)
    d, r = basis.shape
    if r == 0:
        fit = _Fit(np.zeros((outputs - softmax, d)), np.zeros((size, size)), 0.0, 0.0)
    elif task.kind == "regression":
        fit = _least_squares(rows @ basis, targets, basis, robust)
    else:
        draw = rng.generator(seed, "heterogeneity", rng.purpose(name))
        fit = (_softmax if softmax else _labels)(rows @ basis, targets, basis, draw, draws, robust)
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
    )


def _basis(rows: Numbers) -> Numbers:
    """[d, r] whose columns span what the rows know of: with Z = rows @ basis, which is orthogonal, w = basis @ (fit to Z).

    Columns are brought to one length first, so that no unit of measurement decides what counts as nothing.
    """
    lengths = np.linalg.norm(rows, axis=0)
    lengths[lengths == 0] = 1.0
    _, values, turn = np.linalg.svd(rows / lengths, full_matrices=False)
    known = values > NOTHING * max(float(values[0]), np.finfo(float).tiny)
    return (turn[known] / lengths).T


def _turned(covariance: Numbers, basis: Numbers) -> Numbers:
    """The covariance of basis @ v for each output, from that of the v."""
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


def _targets(y: Tensor | ArrayLike, name: str, n: int, kind: str, outputs: int) -> Numbers:
    """Targets as columns [n, outputs]; of classes, ones in the column of the class."""
    found = _array(y, "y", name)
    if found.ndim == 0 or len(found) != n:
        raise InvalidData(f"client {name or '?'} has {n} rows of x and y of shape {found.shape}; give one y per row")
    if kind != "classification":
        if found[0].size != outputs:
            raise InvalidData(f"y of client {name or '?'} has {found[0].size} numbers per row, the model {outputs}; give as many")
        return found.reshape(n, outputs)
    if found.ndim != 1 or (found % 1 != 0).any() or found.min() < 0 or found.max() >= outputs:
        raise InvalidData(f"y of client {name or '?'} holds other numbers than the classes 0 to {outputs - 1}; renumber them")
    return np.eye(outputs)[found.astype(np.int64)]


def _array(value: Tensor | ArrayLike, what: str, name: str) -> Numbers:
    try:
        found = np.array(value.detach().cpu().numpy() if isinstance(value, Tensor) else value, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidData(f"{what} of client {name or '?'} is not an array of numbers; give rows of equal length") from error
    if not np.isfinite(found).all():
        raise InvalidData(f"{what} of client {name or '?'} has a value that is not finite (NaN or infinity); fill or drop it")
    return found


def _ridge(Z: Numbers, curvature: float) -> tuple[float, tuple[str, ...]]:
    """How strong a ridge the rows need: as one average row in every direction where they hardly outnumber r, else none."""
    n, r = Z.shape
    if n >= 1.5 * r + 3:
        return 0.0, ()
    return curvature * float((Z**2).sum()) / n, (f"only {n} rows for {r} inputs: pulled to zero by a ridge",)


def _least_squares(Z: Numbers, Y: Numbers, basis: Numbers, robust: bool) -> _Fit:
    lam, flags = _ridge(Z, 1.0)
    moment = Z.T @ Z
    inverse = np.linalg.inv(moment + lam * np.eye(len(moment)))
    coefficients = inverse @ Z.T @ Y  # [r, outputs]
    smooth = inverse @ moment
    free = max(len(Z) - 2 * np.trace(smooth) + np.trace(smooth @ smooth), 1e-9)  # of the residuals, also with a ridge
    residuals = Y - Z @ coefficients
    sigma = residuals.T @ residuals / free
    shape = smooth @ inverse
    covariance = np.kron(sigma, shape)
    certainty = free / (free + 2)  # a squared estimate of a variance is too large by this
    doubt = 2 * float((sigma**2).sum()) / free * certainty * float(np.trace(_turned(shape, basis))) ** 2
    if robust:
        leverage = np.minimum((Z @ inverse * Z).sum(1), 1 - 1e-6)
        covariance = _sandwich(np.kron(np.eye(Y.shape[1]), inverse), Z, residuals / np.sqrt(1 - leverage)[:, None])
    covariance = _turned(covariance, basis)
    square = float((covariance**2).sum()) * certainty
    return _Fit((basis @ coefficients).T, covariance, 2 * square + doubt, square, lam, flags)


def _sandwich(bread: Numbers, Z: Numbers, residuals: Numbers) -> Numbers:
    scores = np.einsum("na,nr->nar", residuals, Z).reshape(len(Z), -1)
    return bread @ (scores.T @ scores) @ bread


def _labels(Z: Numbers, Y: Numbers, basis: Numbers, draw: np.random.Generator, draws: int, robust: bool) -> _Fit:
    """One logistic fit per label; z of a label is sqrt(2) times the contrast of a softmax over (0, z)."""
    parts = [_softmax(Z, np.stack([y, 1 - y], 1), basis, draw, draws, robust) for y in Y.T]
    return _Fit(
        np.sqrt(2) * np.concatenate([part.parameters for part in parts]),
        2 * block_diag(*(part.covariance for part in parts)),
        4 * sum(part.variance for part in parts),
        4 * sum(part.square for part in parts),
        max(part.ridge for part in parts),
        tuple(dict.fromkeys(flag for part in parts for flag in part.flags)),
    )


def _softmax(Z: Numbers, Y: Numbers, basis: Numbers, draw: np.random.Generator, draws: int, robust: bool) -> _Fit:
    """Parameters in orthonormal contrasts of the classes, so that distances are those of weights that sum to zero over them."""
    outputs = Y.shape[1]
    contrasts = helmert(outputs).T  # [outputs, outputs - 1]
    lam, flags = _ridge(Z, 0.5)  # 1/2: the largest curvature of a softmax
    start = np.zeros((1, outputs - 1, Z.shape[1]))
    found, spread = _maximise(Z, Y[None], contrasts, start, lam)
    logits = Z @ found[0].T @ contrasts.T
    absent = int((Y.sum(0) == 0).sum())
    if absent:
        flags += (f"{absent} of {outputs} classes without a row",)
    elif bool((logits.argmax(1) == Y.argmax(1)).all()):
        flags += ("every row fitted (separable): only the penalty keeps the fit finite",)
    covariance = spread[0]
    if robust:
        excess = (Y - np.exp(log_softmax(logits, 1))) @ contrasts
        covariance = _sandwich(covariance, Z, excess) * len(Z) / max(len(Z) - Z.shape[1], 1)
    covariance, parameters = _turned(covariance, basis), found[0] @ basis.T
    square = float((covariance**2).sum())
    if lam or len(Z) >= PLENTY * len(spread[0]):
        return _Fit(parameters, covariance, 2 * square, square, lam, flags)
    errors, traces = _again(Z, found[0], spread[0], contrasts, basis, draw, draws)
    scale = float(errors.mean() / traces.mean())
    variance = float((errors - scale * traces).var(ddof=1)) * (1 + 1 / draws)
    certainty = float(traces.mean() ** 2 / (traces**2).mean())  # a guess that swings by itself is too large once squared
    return _Fit(parameters, scale * covariance, variance, square * scale**2 * certainty, lam, flags)


def _again(
    Z: Numbers, fit: Numbers, covariance: Numbers, contrasts: Numbers, basis: Numbers, draw: np.random.Generator, draws: int
) -> tuple[Numbers, Numbers]:
    """Squared errors of fits to labels drawn from the client's own fit, and the traces of their textbook covariances.

    The fit is shortened first: its logits hold the noise of the fit, and labels from longer logits would be less noisy to fit
    than the client's own.
    """
    free, r = fit.shape
    own = np.einsum("aras->rs", covariance.reshape(free, r, free, r))
    squared = float(((Z @ fit.T) ** 2).sum())
    share = max(0.0, 1 - float((Z.T @ Z * own).sum()) / squared) if squared > 0 else 0.0
    center = np.sqrt(share) * fit
    logits = Z @ center.T @ contrasts.T
    # the largest of logits and Gumbel noise is a draw from the softmax
    labels = (logits + draw.gumbel(size=(draws, *logits.shape))).argmax(2)
    at_once = max(1, 4_000_000 // (Z.size * free))
    errors, traces = [], []
    for first in range(0, draws, at_once):
        some = np.eye(logits.shape[1])[labels[first : first + at_once]]
        starts = np.broadcast_to(center, (len(some), *center.shape))
        fits, spreads = _maximise(Z, some, contrasts, starts, 0.0, 1e-4)
        errors.append((((fits - center) @ basis.T) ** 2).sum((1, 2)))
        traces.append(np.einsum("baras,rs->b", spreads.reshape(-1, free, r, free, r), basis.T @ basis))
    return np.concatenate(errors), np.concatenate(traces)


class _State(NamedTuple):
    value: Numbers  # [B]
    step: Numbers  # [B, outputs - 1, r]
    gain: Numbers  # [B]: what the step promises
    spread: Numbers  # [B, p, p]


def _maximise(
    Z: Numbers, Y: Numbers, contrasts: Numbers, start: Numbers, lam: float, gain: float = 1e-10
) -> tuple[Numbers, Numbers]:
    """Fits to several sets of labels [B, n, outputs] at once, by Newton's method with step halving, and their covariances.

    It ends where a step promises less than ``gain``, in squared standard errors.

    Without a ridge the likelihood has Jeffreys' penalty, half the log-determinant of the information.
    """
    now = np.array(start)
    state = _state(Z, Y, contrasts, now, lam)
    pace = np.ones(len(now))
    for _ in range(100):
        busy = (state.gain > gain) & (pace > 1e-6)
        if not busy.any():
            break
        there = now[busy] + pace[busy, None, None] * state.step[busy]
        trial = _state(Z, Y[busy], contrasts, there, lam)
        better = trial.value >= state.value[busy] - 1e-10
        taken = np.flatnonzero(busy)[better]
        now[taken] = there[better]
        for old, new in zip(state, trial, strict=True):
            old[taken] = new[better]
        pace[busy] = np.where(better, np.minimum(1.0, 2 * pace[busy]), pace[busy] / 2)
    return now, state.spread


def _state(Z: Numbers, Y: Numbers, contrasts: Numbers, at: Numbers, lam: float) -> _State:
    B, free, r = at.shape
    logs = log_softmax(Z @ at.transpose(0, 2, 1) @ contrasts.T, axis=2)  # [B, n, outputs]
    p = np.exp(logs)
    reduced = p @ contrasts  # [B, n, free]
    blocks = np.empty((B, free, r, free, r))
    for a in range(free):
        for b in range(a, free):
            weight = p @ (contrasts[:, a] * contrasts[:, b]) - reduced[..., a] * reduced[..., b]
            blocks[:, a, :, b] = blocks[:, b, :, a] = Z.T @ (weight[..., None] * Z)
    information = blocks.reshape(B, free * r, free * r)
    size = np.trace(information, axis1=1, axis2=2) / (free * r)
    # saturated probabilities leave a direction with no information at all in floating point
    bent = information + (lam + 1e-10 * size + 1e-12)[:, None, None] * np.eye(free * r)
    inverse = np.linalg.inv(bent)
    value = (Y * logs).sum((1, 2))
    residual = Y - p
    if lam:
        value = value - lam / 2 * (at**2).sum((1, 2))
        spread = inverse @ information @ inverse
    else:
        value = value + np.linalg.slogdet(bent)[1] / 2
        residual = residual + _bias_term(Z, p, inverse.reshape(B, free, r, free, r), contrasts) / 2
        spread = inverse
    slope = (contrasts.T @ (residual.transpose(0, 2, 1) @ Z) - lam * at).reshape(B, -1, 1)
    step = inverse @ slope
    return _State(value, step.reshape(at.shape), (slope * step).sum((1, 2)), spread)


def _bias_term(Z: Numbers, p: Numbers, inverse: Numbers, contrasts: Numbers) -> Numbers:
    """Derivative in the logits of the log-determinant of the information: third cumulants of a draw from p against the
    covariances H of each row's logits, p_k (H_kk - sum_a p_a H_aa - 2 sum_a p_a H_ka + 2 p'Hp)."""
    free = inverse.shape[1]
    inner = np.empty((*p.shape[:2], free, free))
    for a in range(free):
        for b in range(a, free):
            inner[..., a, b] = inner[..., b, a] = ((Z @ inverse[:, a, :, b]) * Z).sum(2)
    H = contrasts @ inner @ contrasts.T  # [B, n, outputs, outputs]
    own = np.einsum("bnkk->bnk", H)
    across = (H @ p[..., None])[..., 0]
    mean = (p * own).sum(2, keepdims=True)
    return p * (own - mean - 2 * across + 2 * (p * across).sum(2, keepdims=True))


# -- at the server --------------------------------------------------------------------------------------------------------
def estimate(received: Sequence[Summary]) -> Heterogeneity:
    """R^2, its interval, and every client's distance to the mean, from the clients' summaries.

    Clients whose fit is pulled to zero or says less than the others' are left out where at least half remain, for the pull would
    count as a difference.
    """
    kept = usable(received)
    W = np.stack([s.parameters for s in kept])
    m = len(kept)
    total = np.sum([s.covariance for s in kept], 0)
    noise = np.array([s.noise for s in kept])
    variances = np.array([s.variance for s in kept])
    apart = W - W.mean(0)
    along = np.array([a @ s.covariance @ a for a, s in zip(apart, kept, strict=True)])  # a'Va of each
    own = np.array([s.square for s in kept])  # trace(V_i^2)
    excess = np.array([float((s.covariance**2).sum()) for s in kept]) - own
    with_all = np.array([float((s.covariance * total).sum()) for s in kept]) - excess  # trace(V_i sum V)
    overall = float((total**2).sum() - excess.sum())
    share = 1 - 1 / m
    spread = _Spread(
        square=float((apart**2).sum()),
        noise=share * float(noise.sum()),
        variance=share**2 * float(variances.sum()) + 2 / m**2 * (overall - float(own.sum())),
        along=float(along.sum() - (1 - 2 / m) * own.sum() - overall / m**2),
        slope=float(noise.sum()) / W.size,
    )
    low, high = _interval(spread)
    distances = []
    for i, s in enumerate(kept):
        # covariance of w_i - mean w: (1 - 2/m) V_i + total/m^2
        traces = (1 - 2 / m) * noise[i] + noise.sum() / m**2
        squared = (1 - 2 / m) ** 2 * own[i] + 2 * (1 - 2 / m) * with_all[i] / m**2 + overall / m**4
        inner = (1 - 2 / m) * along[i] + float(apart[i] @ total @ apart[i]) / m**2
        single = _Spread(
            square=float((apart[i] ** 2).sum()),
            noise=traces,
            variance=2 * squared + (1 - 2 / m) ** 2 * (variances[i] - 2 * own[i]) + float((variances - 2 * own).sum()) / m**4,
            along=inner - squared,
            slope=traces / W.shape[1],
        )
        distances.append(Distance(s.name, max(0.0, single.excess), *_interval(single), s.flags))
    return Heterogeneity(
        r2=max(0.0, spread.excess / m),
        interval=(low / m, high / m),
        noise=float(noise.mean()),
        zero=low == 0,
        per_client=tuple(distances),
        trusted=_trust(received, kept),
        n=min(s.n for s in kept),
        d=W.shape[1],
        m=m,
        unbiased=spread.excess / m,
        population=max(0.0, spread.excess / (m - 1)),
        left_out=tuple(s.name for s in received if all(s is not other for other in kept)),
    )


def usable(received: Sequence[Summary]) -> tuple[Summary, ...]:
    """The summaries that can be compared: those with full and unpulled fits where these are half of all or more, else all."""
    if not isinstance(received, Sequence) or not all(isinstance(s, Summary) for s in received):
        raise InvalidArgument("estimates need a list of summaries; make one per client with summary(task, x, y)")
    if len(received) < 2:
        raise InvalidData(f"heterogeneity is a difference between clients and there are {len(received)}; give at least two")
    if len({len(s.parameters) for s in received}) > 1:
        raise InvalidData("the summaries are of models of different sizes; fit the same model at every client")
    most = max(s.rank for s in received)
    full = tuple(s for s in received if s.rank == most and not s.ridge)
    return full if len(full) >= max(2, len(received) / 2) else tuple(received)


class _Spread(NamedTuple):
    """A squared distance of noisy vectors, and what is known of its law: the ``noise`` in its mean, the ``variance`` it has where
    the truth is 0, an unbiased guess of true differences ``along`` the noise (a'Va), and how that grows with their square."""

    square: float
    noise: float
    variance: float
    along: float
    slope: float

    @property
    def excess(self) -> float:
        return self.square - self.noise

    def law(self, truth: float) -> tuple[float, float]:
        """(mean, degrees of freedom) of the square if the true square is ``truth``."""
        mean = self.noise + truth
        # the guess holds at the truth it comes with; from there on as if differences had no preferred direction
        along = max(self.along + self.slope * (truth - self.excess), 0.1 * self.slope * truth)
        variance = self.variance + 4 * along
        return mean, min(2 * mean**2 / variance, 1e9) if variance > 0 else 1e9


def _interval(spread: _Spread) -> tuple[float, float]:
    """The true squares that the one seen does not contradict at 5 % on either side.

    The upper end never falls below that of a square with no excess: less spread than noise makes is luck, not knowledge.
    """
    if spread.square <= 0 and spread.noise <= 0:
        return 0.0, 0.0

    def above(truth: float) -> float:
        mean, free = spread.law(truth)
        return float(gammaincc(free / 2, free / 2 * spread.square / mean)) - TAIL

    seen = max(spread.square, spread.noise)

    def below(truth: float) -> float:
        mean, free = spread.law(truth)
        return float(gammainc(free / 2, free / 2 * seen / mean)) - TAIL

    low = 0.0 if spread.excess <= 0 or above(0.0) >= 0 else _root(above, 0.0, spread.excess)
    top = max(spread.excess, 0.0)
    reach = seen
    while below(top + reach) > 0:
        reach *= 2
    return low, _root(below, top, top + reach)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where the function changes sign, or the end it is nearly zero at."""
    at_low, at_high = function(low), function(high)
    if at_low * at_high > 0:
        return low if abs(at_low) < abs(at_high) else high
    return float(brentq(function, low, high, xtol=1e-12 * max(high, 1e-300), rtol=1e-10))


def _trust(received: Sequence[Summary], kept: Sequence[Summary]) -> str:
    """How far an estimate from these summaries can be trusted, in a sentence or two."""
    said = []
    if len(kept) < len(received):
        said.append(f"{len(received) - len(kept)} of {len(received)} clients have too little data to compare and are left out.")
    pulled = sum(s.ridge > 0 for s in kept)
    few = sum(s.n < ENOUGH * s.load for s in kept)
    if pulled:
        said.append(
            f"{pulled} of {len(kept)} fits are pulled to zero for want of rows, so differences between clients are blurred and "
            "partly made up: take R^2 as an order of magnitude at best."
        )
    elif few:
        said.append(
            f"{few} of {len(kept)} clients have fewer than {ENOUGH} rows per parameter: take R^2 as a rough guess and its "
            "interval as too narrow."
        )
    absent = sum(any("without a row" in flag or "separable" in flag for flag in s.flags) for s in kept)
    if absent and not pulled:
        said.append(
            f"{absent} of {len(kept)} clients have separable data or lack a class: how long their parameters are is not in the "
            "data, so R^2 may well be larger than the interval says."
        )
    if any(s.rank < s.inputs for s in kept):
        said.append("Directions of which a client's rows say nothing count as zero there.")
    if not said:
        said.append(
            f"Every client has at least {ENOUGH} rows per parameter: the interval holds the truth about nine times in ten."
        )
    return " ".join(said)
