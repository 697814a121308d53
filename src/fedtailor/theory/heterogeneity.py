"""How far apart the clients' true parameters are, from one exchange: R^2, the mean squared distance to their mean.

Each client fits a linear model to its own training rows and sends the fit and how uncertain it is (``theory/fits.py``); no row
leaves it. The server compares the spread of the fits with the spread that noise alone makes (``estimate``):

    R^2 = mean |w_i - mean w|^2 of the fits - (1 - 1/m) mean trace(V_i),    V_i the covariance of client i's fit,

which is unbiased for *these* m clients; for a population they are drawn from it is m/(m - 1) times that. The interval inverts a
test: R^2 is in it unless the spread seen is in a tail of what R^2 would give. The spread is taken as a multiple of a chi-square
with its mean and variance, to which the noise, the true differences and the guess of the noise all contribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import gammainc, gammaincc
from torch import Tensor

from fedtailor import models
from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.split import Split
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.task import Task
from fedtailor.theory.fits import DRAWS, NOTHING, Summary, summary

TAIL = 0.05  # on either side of the 90 % interval
ENOUGH = 5  # rows per parameter from which on the interval was measured to hold


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
    squared error of a client's fit, ``zero`` says that R^2 is not distinguishable from 0, ``trusted`` how far to trust this,
    ``n`` is the smallest number of rows, ``d`` the number of parameters, ``load`` of how many of them the rows say something;
    ``left_out`` names the clients that R^2 is not about.
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
    load: int = 0

    def json(self) -> dict[str, Any]:
        return {
            "r2": self.r2,
            "interval": list(self.interval),
            "noise": self.noise,
            "zero": self.zero,
            "trusted": self.trusted,
            "n": self.n,
            "d": self.d,
            "load": self.load,
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
    """Return every client's ``summary``, from its training rows."""
    return tuple(
        summary(task, *federation.train.client(i), name=name, draws=draws, seed=seed, robust=robust)
        for i, name in enumerate(federation.names)
    )


def on_features(task: Task, params: Mapping[str, Tensor], federation: Federation) -> Federation:
    """Return the federation as the last layer of a network sees it: features in place of rows, labels kept.

    R^2 of the last layer is then ``measure(linear_task(fed), fed)``.
    """
    if task.features is None:
        raise InvalidArgument("the model has no last layer to take features before; name one with groups={'head': ...}")
    features = task.features

    def last_inputs(x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([features(dict(params), part).flatten(1).detach() for part in x.split(1024)])

    return _mapped(federation, last_inputs)


def projected(federation: Federation, directions: int, seed: int = 0) -> Federation:
    """Return the federation on ``directions`` orthonormal directions of its features, drawn at random, so no client has to say
    anything about its data."""
    features = int(np.prod(federation.train.x.shape[1:]))
    normals = rng.generator(seed, "directions").normal(size=(features, directions))
    basis = torch.from_numpy(np.linalg.qr(normals)[0])
    return _mapped(federation, lambda x: x.flatten(1) @ basis.to(x))


def _mapped(federation: Federation, transform: Callable[[Tensor], Tensor]) -> Federation:
    """Return the federation with transformed features and the same labels."""

    def mapped(split: Split) -> Split:
        return Split(transform(split.x), split.y, split.offsets, split.kinds)

    return replace(
        federation,
        train=mapped(federation.train),
        test=mapped(federation.test),
        val=None if federation.val is None else mapped(federation.val),
        public=None if federation.public is None else transform(federation.public),
        truth=None,
        schema=None,
        recipe=None,
    )


def linear_task(federation: Federation, *, bias: bool = True) -> Task:
    """Return the linear model of a federation's rows, as a task."""
    module = models.build("linear", tuple(federation.train.x.shape[1:]), federation.outputs, bias=bias)
    return Task.from_module(module.double(), federation.kind.loss, classes=federation.labels)


def residual_variance(federation: Federation) -> float:
    """Mean squared residual of the clients' own least-squares fits, with the degrees of freedom taken off."""
    total = rows = 0.0
    for i in range(len(federation)):
        x, y = federation.train.client(i)
        design = torch.cat([x.flatten(1).double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
        target = y.double().reshape(len(y), -1)
        if len(x) > design.shape[1]:
            residual = target - design @ torch.linalg.lstsq(design, target, driver="gelsd").solution
            total += float((residual**2).sum()) / target.shape[1]
            rows += len(x) - design.shape[1]
    return total / rows if rows else float(federation.train.y.double().var())


def estimate(received: Sequence[Summary]) -> Heterogeneity:
    """R^2, its interval, and every client's distance to the mean, from the clients' summaries.

    Clients whose fit is pulled to zero or says less than the others' are left out where at least half remain, for the pull would
    count as a difference.
    """
    used = usable(received)
    W = np.stack([s.parameters for s in filled(used)])
    m = len(used)
    total = np.sum([s.covariance for s in used], 0)
    noise = np.array([s.noise for s in used])
    variances = np.array([s.variance for s in used])
    deviations = W - W.mean(0)
    along = np.array([a @ s.covariance @ a for a, s in zip(deviations, used, strict=True)])  # a'Va of each
    own = np.array([s.square for s in used])  # trace(V_i^2)
    excess = np.array([float((s.covariance**2).sum()) for s in used]) - own
    with_all = np.array([float((s.covariance * total).sum()) for s in used]) - excess  # trace(V_i sum V)
    overall = float((total**2).sum() - excess.sum())
    share = 1 - 1 / m
    spread = _Spread(
        square=float((deviations**2).sum()),
        noise=share * float(noise.sum()),
        variance=share**2 * float(variances.sum()) + 2 / m**2 * (overall - float(own.sum())),
        along=float(along.sum() - (1 - 2 / m) * own.sum() - overall / m**2),
        slope=float(noise.sum()) / W.size,
    )
    low, high = _interval(spread)
    distances = []
    for i, s in enumerate(used):
        # covariance of w_i - mean w: (1 - 2/m) V_i + total/m^2
        traces = (1 - 2 / m) * noise[i] + noise.sum() / m**2
        squared = (1 - 2 / m) ** 2 * own[i] + 2 * (1 - 2 / m) * with_all[i] / m**2 + overall / m**4
        inner = (1 - 2 / m) * along[i] + float(deviations[i] @ total @ deviations[i]) / m**2
        single = _Spread(
            square=float((deviations[i] ** 2).sum()),
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
        trusted=_trust(received, used),
        n=min(s.n for s in used),
        d=W.shape[1],
        load=max(s.load for s in used),
        m=m,
        unbiased=spread.excess / m,
        population=max(0.0, spread.excess / (m - 1)),
        left_out=tuple(s.name for s in received if all(s is not other for other in used)),
    )


def usable(received: Sequence[Summary]) -> tuple[Summary, ...]:
    """Return the summaries that can be compared: those with full and unpulled fits where these are half of all or more, else
    all."""
    if not isinstance(received, Sequence) or not all(isinstance(s, Summary) for s in received):
        raise InvalidArgument("estimates need a list of summaries; make one per client with summary(task, x, y)")
    if len(received) < 2:
        raise InvalidData(f"heterogeneity is a difference between clients and there are {len(received)}; give at least two")
    if len({len(s.parameters) for s in received}) > 1:
        raise InvalidData("the summaries are of models of different sizes; fit the same model at every client")
    most = max(s.rank for s in received)
    full = tuple(s for s in received if s.rank == most and not s.ridge)
    return full if len(full) >= max(2, len(received) / 2) else tuple(received)


def filled(received: Sequence[Summary]) -> tuple[Summary, ...]:
    """Return the summaries, filled with what is common to all in the directions of which a client's rows say nothing.

    That is the w with the least sum of squared distances to the fits in the directions that each of them knows: their mean if all
    know all. A column that is constant at each client, but not the same at all, is determined by them together.
    """
    if all(s.span is None for s in received):
        return tuple(received)
    d = received[0].inputs
    known = [np.eye(d) if s.span is None else s.span @ s.span.T for s in received]
    fits = [s.parameters.reshape(-1, d) for s in received]
    common = np.linalg.lstsq(np.sum(known, 0), np.sum(fits, 0).T, rcond=NOTHING)[0].T  # [outputs, d]
    full = [(fit + common - common @ known_by_one).ravel() for fit, known_by_one in zip(fits, known, strict=True)]
    return tuple(replace(s, parameters=w) for s, w in zip(received, full, strict=True))


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
        """Return (mean, degrees of freedom) of the square if the true square is ``truth``."""
        mean = self.noise + truth
        # the guess holds at the truth it comes with; from there on as if differences had no preferred direction
        along = max(self.along + self.slope * (truth - self.excess), 0.1 * self.slope * truth)
        variance = self.variance + 4 * along
        return mean, min(2 * mean**2 / variance, 1e9) if variance > 0 else 1e9


def _interval(spread: _Spread) -> tuple[float, float]:
    """Return the true squares that the one seen does not contradict at 5 % on either side.

    The upper end never falls below that of a square with no excess: less spread than noise makes is luck, not knowledge.
    """
    if spread.square <= 0 and spread.noise <= 0:
        return 0.0, 0.0

    def above(truth: float) -> float:
        mean, free = spread.law(truth)
        return float(gammaincc(free / 2, free / 2 * spread.square / mean)) - TAIL

    observed = max(spread.square, spread.noise)

    def below(truth: float) -> float:
        mean, free = spread.law(truth)
        return float(gammainc(free / 2, free / 2 * observed / mean)) - TAIL

    low = 0.0 if spread.excess <= 0 or above(0.0) >= 0 else _root(above, 0.0, spread.excess)
    top = max(spread.excess, 0.0)
    reach = observed
    while below(top + reach) > 0:
        reach *= 2
    return low, _root(below, top, top + reach)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where the function changes sign, or the end at which it is nearly zero."""
    at_low, at_high = function(low), function(high)
    if at_low * at_high > 0:
        return low if abs(at_low) < abs(at_high) else high
    return float(brentq(function, low, high, xtol=1e-12 * max(high, 1e-300), rtol=1e-10))


def _trust(received: Sequence[Summary], used: Sequence[Summary]) -> str:
    """Return how far an estimate from these summaries can be trusted, in a sentence or two."""
    notes = []
    if len(used) < len(received):
        notes.append(f"{len(received) - len(used)} of {len(received)} clients have too little data to compare and are left out.")
    pulled = sum(s.ridge > 0 for s in used)
    few = sum(s.n < ENOUGH * s.load for s in used)
    if pulled:
        notes.append(
            f"{pulled} of {len(used)} fits are pulled to zero for want of rows, so differences between clients are blurred and "
            "partly made up: take the spread as an order of magnitude at best."
        )
    elif few:
        notes.append(
            f"{few} of {len(used)} clients have fewer than {ENOUGH} rows per parameter: take the spread as a rough guess and its "
            "interval as too narrow."
        )
    absent = sum(any("without a row" in flag or "separable" in flag for flag in s.flags) for s in used)
    if absent and not pulled:
        notes.append(
            f"{absent} of {len(used)} clients have separable data or lack a class: how long their parameters are is not in the "
            "data, so the spread may well be larger than the interval says."
        )
    if any(s.rank < s.inputs for s in used):
        notes.append("Directions of which a client's rows say nothing are taken as common to all.")
    if not notes:
        notes.append(
            f"Every client has at least {ENOUGH} rows per parameter: the interval holds the truth about nine times in ten."
        )
    return " ".join(notes)
