"""Problem (2) of CLUP solved exactly: min over g and w_i of sum p_i (f_i(w_i) + lam_i/2 |w_i - g|^2), for linear models.

f_i is client i's training risk plus ``weight_decay``/2 |w|^2. The unknowns are g and the gaps d_i = w_i - g, and Newton's method
acts on all of them at once: with H_i the Hessian of f_i and A_i = H_i + lam_i the system of g alone is

    (sum p_i lam_i A_i^-1 H_i) dg = sum p_i lam_i (d_i - A_i^-1 r_i),    r_i = grad f_i(w_i) + lam_i d_i,

whose matrix is the Hessian of the envelope F(g) = sum p_i min_w (f_i(w) + lam_i/2 |w - g|^2). Written in gaps nothing cancels,
neither for tiny nor for huge lam. lam = 0 is local training (g is then the mean of the w_i, its limit), lam = inf the pooled
minimum. A least-squares problem is solved by the first step, the next one removes rounding.

Of the softmax models that predict alike (add the same weights to every class), the one whose classes' weights sum to zero is
returned; training from zero stays there as well. It is found in K - 1 orthonormal contrasts of the K classes, which keep lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.task import Task
from fedtailor.theory import pulled
from fedtailor.theory.pulled import Problem, hessians_of, lam_per_client, problem_of, risks

TOLERANCE = 1e-10  # of the envelope's gradient, against the gradients at zero
_STEPS = 200  # of Newton's method, at most
_FLAT = 1e-13  # of a coordinate's curvature: what counts as none
_GONE = 1e-9  # of its curvature at zero: where labels can be separated, it vanishes as fast as the gradient

Lam = float | str | Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Solution:
    """The minimum of Problem (2), in float64.

    ``gradient_norm`` is the certificate: the envelope's gradient at ``g`` is no longer than this, whatever is left of the
    clients' inner problems included; ``relative`` is the same against the mean length of the clients' gradients at zero.
    """

    lam: NDArray[np.float64]
    g: dict[str, Tensor]
    models: tuple[dict[str, Tensor], ...]
    objective: float
    gradient_norm: float
    relative: float
    steps: int
    gaps: Tensor  # w_i - g, [clients, blocks, size]: exact where the models themselves round
    center: Tensor  # g, [blocks, size]


def solve(
    task: Task,
    federation: Federation,
    lam: Lam,
    *,
    weights: str | Sequence[float] = "uniform",
    weight_decay: float = 0.0,
    start: Solution | None = None,
) -> Solution:
    """Return the minimum of Problem (2) at one ``lam``: a number of at least 0 (inf: one model for all), one per client, or
    ``"client"`` for those of ``federation.with_facts(lam=...)``.

    ``weights`` are the p_i: ``"uniform"``, ``"size"`` or a positive number per client. ``start`` is a solution of the same task
    and federation to begin from. Stops when the envelope's gradient is certified to be at most ``TOLERANCE`` of the clients'
    mean gradient at zero.
    """
    problem = problem_of(task, federation, weights, weight_decay)
    return _newton(problem, lam_per_client(lam, federation), start)


def solve_path(
    task: Task,
    federation: Federation,
    lams: Sequence[float],
    *,
    weights: str | Sequence[float] = "uniform",
    weight_decay: float = 0.0,
) -> list[Solution]:
    """Solve Problem (2) at each of ``lams``, from the largest to the smallest, each begun at the solution before; the solutions
    come in the order of ``lams``."""
    problem = problem_of(task, federation, weights, weight_decay)
    lam_values = [lam_per_client(lam, federation) for lam in lams]
    solutions: dict[int, Solution] = {}
    before: Solution | None = None
    for k in sorted(range(len(lam_values)), key=lambda k: -float(lam_values[k].max())):
        before = solutions[k] = _newton(problem, lam_values[k], before)
    return [solutions[k] for k in range(len(lam_values))]


# -- Newton's method -------------------------------------------------------------------------------------------------------
class _Point(NamedTuple):
    center: Tensor
    gaps: Tensor
    objective: float
    slopes: Tensor  # grad f_i(w_i)


def _newton(problem: Problem, lam: NDArray[np.float64], start: Solution | None) -> Solution:
    clients = len(lam)
    pull = torch.from_numpy(lam)[:, None, None]
    pooled = pull.isinf()  # these clients take g itself, with no gap
    center = torch.zeros(problem.shape, dtype=torch.float64)
    gaps = torch.zeros(clients, *problem.shape, dtype=torch.float64)
    scale = _mean_length(problem, risks(problem, gaps)[1])
    if start is not None:
        if start.gaps.shape != gaps.shape:
            raise InvalidArgument("start is the solution of another problem; give one of the same model and clients")
        center, gaps = start.center, torch.where(pooled, 0.0, start.gaps)
    here = _point_at(problem, pull, pooled, center, gaps)
    best, norm = here, _certificate(problem, pull, pooled, here)
    steps, polished = 0, False
    while not polished and steps < _STEPS:
        polished = norm <= TOLERANCE * scale  # one more step brings it down to rounding
        here = _step(problem, pull, pooled, best)
        steps += 1
        length = _certificate(problem, pull, pooled, here)
        if not polished or length < norm:
            best, norm = here, length
    if not norm <= TOLERANCE * scale:
        raise InvalidData(
            f"no certified minimum after {steps} Newton steps (relative gradient {norm / scale:.1e}): features are nearly "
            "collinear, or differ much in scale; standardise them, or add weight_decay"
        )
    center, gaps = best.center, best.gaps
    if not pull.any():
        mean = (problem.weights[:, None, None] * gaps).sum(0)
        center, gaps = center + mean, gaps - mean
    models = tuple(problem.model(center + gap) for gap in gaps)
    relative = norm / scale if scale else 0.0
    return Solution(lam, problem.model(center), models, best.objective, norm, relative, steps, gaps, center)


def _point_at(problem: Problem, pull: Tensor, pooled: Tensor, center: Tensor, gaps: Tensor) -> _Point:
    values, slopes = risks(problem, center + gaps)
    pulls = torch.where(pooled, 0.0, pull * gaps**2).sum((1, 2)) / 2
    return _Point(center, gaps, float(problem.weights @ (values + pulls)), slopes)


def _mean_length(problem: Problem, vectors: Tensor) -> float:
    return float(problem.weights @ vectors.flatten(1).norm(dim=1))


def _residuals(pull: Tensor, pooled: Tensor, here: _Point) -> Tensor:
    """Return what is left of the clients' inner problems: grad f_i + lam_i d_i (nothing, where there is no gap)."""
    return torch.where(pooled, 0.0, here.slopes + torch.where(pooled, 0.0, pull) * here.gaps)


def _certificate(problem: Problem, pull: Tensor, pooled: Tensor, here: _Point) -> float:
    """Return an upper bound on the length of the envelope's gradient at g.

    That gradient is sum p_i lam_i (g - w_i*) with w_i* the exact inner minimum; w_i misses it by at most |r_i|/lam_i.
    """
    slopes = torch.where(pooled, here.slopes, -torch.where(pooled, 0.0, pull) * here.gaps)
    total = (problem.weights[:, None, None] * slopes).sum(0).norm()
    return float(total) + _mean_length(problem, _residuals(pull, pooled, here))


def _step(problem: Problem, pull: Tensor, pooled: Tensor, here: _Point) -> _Point:
    """Take a Newton step, shortened until the objective falls as a convex function must (Armijo)."""
    center_step, gap_steps = _direction(problem, pull, pooled, here)
    moves = center_step + gap_steps
    pull_slopes = torch.where(pooled, 0.0, pull) * here.gaps * gap_steps
    slope = float(problem.weights @ ((here.slopes * moves).sum((1, 2)) + pull_slopes.sum((1, 2))))
    noise = 1e-13 * abs(here.objective)  # close to the minimum the objective cannot tell points apart
    length = 1.0
    while True:
        there = _point_at(problem, pull, pooled, here.center + length * center_step, here.gaps + length * gap_steps)
        if there.objective <= here.objective + 1e-4 * length * slope + noise or length < 1e-8:
            return there
        length /= 2


def _direction(problem: Problem, pull: Tensor, pooled: Tensor, here: _Point) -> tuple[Tensor, Tensor]:
    """Return (dg, dd_i) of the module's docstring: dd_i = -A_i^-1 (r_i + H_i dg)."""
    residuals = _residuals(pull, pooled, here)
    finite = torch.where(pooled, 1.0, pull)  # a stand-in: what it enters is thrown away
    blocks, size = problem.shape
    matrix = torch.zeros(1 if problem.kind.least_squares else blocks, size, size, dtype=torch.float64)
    right = torch.zeros(blocks, size, dtype=torch.float64)
    small = len(problem.names) * len(matrix) * size * size <= pulled.ROOM
    chunks: list[tuple[Tensor, Tensor, Tensor]] = []
    for ids, solved_rest, solved_hessian in _solved(problem, finite, pooled, here, residuals):
        weight, lam, is_pooled = problem.weights[ids, None, None], finite[ids], pooled[ids]
        matrix += (weight[..., None] * torch.where(is_pooled[..., None], solved_hessian, lam[..., None] * solved_hessian)).sum(0)
        right += (weight * torch.where(is_pooled, -here.slopes[ids], lam * (here.gaps[ids] - solved_rest))).sum(0)
        if small:
            chunks.append((ids, solved_rest, solved_hessian))
    center_step = torch.zeros_like(right)
    if bool((pull > 0).any()):
        at_zero = torch.where(pooled, problem.diagonal, finite * problem.diagonal / (finite + problem.diagonal)).nan_to_num()
        factor = _factor(
            (matrix + matrix.transpose(-1, -2)) / 2,
            (problem.weights[:, None, None] * at_zero).sum(0)[: len(matrix)],
        )
        center_step = torch.cholesky_solve(right[..., None], factor)[..., 0]
    gap_steps = torch.zeros_like(here.gaps)
    for ids, solved_rest, solved_hessian in chunks or _solved(problem, finite, pooled, here, residuals):
        gap_steps[ids] = torch.where(pooled[ids], 0.0, -solved_rest - (solved_hessian @ center_step[..., None])[..., 0])
    return center_step, gap_steps


def _solved(
    problem: Problem, finite: Tensor, pooled: Tensor, here: _Point, residuals: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (ids, A_i^-1 r_i, A_i^-1 H_i) in chunks; where lam_i is infinite, H_i itself in the last place."""
    for ids, hessians in hessians_of(problem, here.center + here.gaps):
        eye = torch.eye(hessians.shape[-1], dtype=hessians.dtype)
        # where there is no gap A_i is not used, and H_i may be singular
        matrices = torch.where(pooled[ids][..., None], eye, hessians + finite[ids][..., None] * eye)
        factor = _factor(
            matrices,
            torch.where(pooled[ids], 1.0, problem.diagonal[ids])[:, : hessians.shape[1]],
            [problem.names[int(i)] for i in ids],
        )
        solved_hessian = torch.where(pooled[ids][..., None], hessians, torch.cholesky_solve(hessians, factor))
        yield ids, torch.cholesky_solve(residuals[ids][..., None], factor)[..., 0], solved_hessian


def _factor(matrices: Tensor, at_zero: Tensor, names: Sequence[str] = ()) -> Tensor:
    """Return Cholesky factors; refuse, naming the first client, where a matrix has a direction with no curvature, or with none
    left of what it had at zero (``at_zero``, per coordinate). Without names the matrix is that of all clients."""
    factor, failed = torch.linalg.cholesky_ex(matrices)
    pivots = factor.diagonal(dim1=-2, dim2=-1) ** 2
    least = torch.maximum(_FLAT * matrices.diagonal(dim1=-2, dim2=-1), _GONE * at_zero)
    flat = (failed > 0) | ~(pivots > least).all(-1)
    if bool(flat.any()):
        if not names:
            raise InvalidData("the clients' risks together have no unique minimum; add weight_decay, or rows")
        raise InvalidData(
            f"the risk of client {names[int(torch.nonzero(flat)[0, 0])]} has no unique minimum by itself, and lam does not "
            "hold it; use a larger lam, add weight_decay, or give it more rows"
        )
    return factor
