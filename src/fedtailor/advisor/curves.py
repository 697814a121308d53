"""Error over lam, for the advice page: Theorem 1's bound from estimated constants, and what Problem (2)'s exact solution does.

Two quantities that must not be mixed. *Squared distance*, mean over clients of |w_i - w*_i|^2, is what the theorem bounds; in
least squares it can be estimated without the truth: the client's own fit v_i is unbiased with covariance V_i, so
|w_i - v_i|^2 - tr V_i + 2 tr Cov(w_i, v_i) has the right mean (Stein), and w_i is linear in the fits. *Validation loss* is what
a user gets. Everything is computed from training and validation rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtailor.advisor.advice import Advice
from fedtailor.advisor.pilot import task_and_rows
from fedtailor.data.federation import Federation
from fedtailor.data.split import Split
from fedtailor.engine.options import AdviceOptions
from fedtailor.errors import FedtailorError, InvalidArgument
from fedtailor.metrics.truth import fits
from fedtailor.task import Task
from fedtailor.theory import bounds
from fedtailor.theory.constants import constants, noise
from fedtailor.theory.envelope import Solution, solve_path
from fedtailor.theory.heterogeneity import Heterogeneity

Numbers = NDArray[np.float64]

FINE = 12  # lams per decade, of the bound
COARSE = 3  # lams per decade, of the exact solutions
FEWEST_LAMS = 9  # exact solutions at least, where each takes long
MOST_WORK = 6e9  # clients * parameters^3 * lams that are solved for: about half a minute
LARGEST_LAM = 100.0  # in units of the smoothness: with a larger lam there is one model for all
DECAY = 1e-3  # share of the smoothness that is added as weight decay where a risk has no curvature of its own
FLATTEST = 1e-6  # mu/L below which a risk counts as having none


def facts(
    federation: Federation, model: str | nn.Module | Task, advice: Advice, options: AdviceOptions | None = None
) -> dict[str, Any]:
    """Return what the page needs beside the advice, as plain values: ``curves`` and ``map``. With the ``options`` of ``advise``
    the rows are those that it saw."""
    options = options or AdviceOptions()
    task, rows = task_and_rows(federation, model, options)
    try:
        drawn = curves(rows, task, advice.heterogeneity, weights=options.weights)
    except FedtailorError as error:
        drawn = {"refused": str(error)}
    return {"curves": drawn, "map": place(rows, advice.heterogeneity)}


def place(federation: Federation, estimate: Heterogeneity | None) -> dict[str, Any]:
    """Return m and N of the clients that R^2 is about, and how many rows they have."""
    left_out = set() if estimate is None else set(estimate.left_out)
    sizes = np.array([n for n, name in zip(federation.train.sizes, federation.names, strict=True) if name not in left_out])
    return {
        "m": len(sizes),
        "N": int(sizes.sum()),
        "rows": {"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())},
    }


def curves(
    federation: Federation, task: Task, estimate: Heterogeneity | None, *, weights: str | Sequence[float] = "uniform"
) -> dict[str, Any] | None:
    """Plain values for a picture over lam; None where the model is not linear. The federation must have validation rows.

    ``bound``: Theorem 1's two branches (None where a branch says nothing), or None without an estimate of R^2. ``measured``: the
    exact solution at every lam, ``ends`` the same at 0 and infinity: validation ``loss``, ``score``, ``excess`` of the loss over
    the best lam with its standard error ``se`` (paired over clients), the estimated squared ``distance`` (least squares only,
    of ``distance_of`` clients) and the ``true`` one where the truth is known. ``weight_decay`` is greater than 0 where the
    clients' risks are not strongly convex by themselves; everything is then about the regularised problem.
    """
    if task.gradient is None:
        return None
    if federation.val is None:
        raise InvalidArgument("the error over lam is judged on validation rows and there are none; give val=")
    _affordable(task, federation, np.ones(FEWEST_LAMS))  # refuses before any work is done
    decay, curvature = _curvature(task, federation)
    local = solve_path(task, federation, [0.0], weights=weights, weight_decay=decay)[0]
    setting = None if estimate is None else _setting(task, federation, estimate, curvature.mu, curvature.smoothness, local)
    least, most = _range(curvature.mu, curvature.smoothness, setting)
    lams = _affordable(task, federation, _grid(least, min(most, LARGEST_LAM * curvature.smoothness), COARSE))
    solved = solve_path(task, federation, [*lams.tolist(), np.inf], weights=weights, weight_decay=decay)
    measured = _measured(task, federation, [local, *solved], weights, decay)
    return {
        "kind": task.kind,
        "score": task.kind.score.name,
        "weight_decay": decay,
        "constants": None if setting is None else {**setting._asdict(), "N": setting.N},
        "bound": None if setting is None else _bound(_grid(least, most, FINE), setting),
        "optimal": None if setting is None else _optimal(setting),
        "measured": {key: _cut(values, 1, -1) for key, values in measured.items()} | {"lam": lams.tolist()},
        "ends": {
            "local": {key: None if values is None else values[0] for key, values in measured.items()},
            "shared": {key: None if values is None else values[-1] for key, values in measured.items()},
        },
    }


# -- the bound ------------------------------------------------------------------------------------------------------------
def _curvature(task: Task, federation: Federation) -> tuple[float, Any]:
    """Return (weight decay, constants mu and L): no decay where every client's risk is strongly convex, else a little."""
    try:
        bare = constants(task, federation)
        if bare.mu >= FLATTEST * bare.smoothness:
            return 0.0, bare
    except InvalidArgument:
        pass
    rough = constants(task, federation, task.kind.curvature)  # a decay that cannot be refused, taken off again
    decay = DECAY * (rough.smoothness - task.kind.curvature) or DECAY
    return decay, constants(task, federation, decay)


def _setting(task: Task, federation: Federation, estimate: Heterogeneity, mu: float, L: float, local: Solution) -> bounds.Setting:
    """Theorem 1's constants, estimated: the gradients' noise is taken at the clients' own fits, about its mean (which is what
    weight decay balances there), and R^2 is the mean squared distance. (5) asks for the largest one; but the largest of noisy
    estimates is mostly noise, and it is the mean error over clients that is drawn beside the bound."""
    dtype = federation.train.x.dtype
    at = [{name: leaf.to(dtype) for name, leaf in model.items()} for model in local.models]
    rho2 = noise(task, federation, at).sigma2
    return bounds.setting(mu, L, max(rho2, 0.0), estimate.r2, int(federation.train.sizes.min()), len(federation))


def _range(mu: float, L: float, setting: bounds.Setting | None) -> tuple[float, float]:
    """Return (least, largest) lam of the picture: from where the second branch is still flat to where the first is flat again."""
    onset = 32 * L**2 / mu  # below about this lam the first branch says nothing
    turn = mu
    if setting is not None and setting.rho2 > 0:
        turn = mu / (1 + setting.R2 * setting.n * mu**2 / setting.rho2)
    return max(turn, 1e-6 * L) / 30, 5 * onset


def _affordable(task: Task, federation: Federation, lams: Numbers) -> Numbers:
    """Return the lams, or fewer where each takes long; refused where even a few would."""
    weight = task.init()["weight"]
    size = (weight.shape[1] + 1) * (weight.shape[0] - 1 if task.kind.softmax else 1)
    most = int(MOST_WORK / (len(federation) * float(size) ** 3))
    if most < FEWEST_LAMS:
        raise InvalidArgument(
            f"solving exactly for {size} parameters of {len(federation)} clients takes too long; use fewer features"
        )
    return lams if len(lams) <= most else np.geomspace(lams[0], lams[-1], most)


def _grid(low: float, high: float, per_decade: int) -> Numbers:
    return np.geomspace(low, high, int(per_decade * np.log10(high / low)) + 1)


def _bound(lams: Numbers, setting: bounds.Setting) -> dict[str, list[Any]]:
    points = [bounds.statistical(float(lam), setting) for lam in lams]
    columns = {name: [_finite(getattr(point, name)) for point in points] for name in ("shared", "local", "bound")}
    return {"lam": lams.tolist(), **columns}


def _optimal(setting: bounds.Setting) -> dict[str, Any]:
    optimum = bounds.optimal_lam(setting)
    return {"regime": optimum.regime, "least": _finite(optimum.least), "most": _finite(optimum.most)}


# -- the exact solutions --------------------------------------------------------------------------------------------------
def _measured(
    task: Task, federation: Federation, solved: list[Solution], weights: str | Sequence[float], decay: float
) -> dict[str, list[Any] | None]:
    """Return the columns of ``curves``' ``measured``, a value per solution, of which the first is that of lam = 0."""
    assert federation.val is not None
    W = _stacked(solved)  # [lams, clients, outputs, columns]
    losses, scores = _judge(task, federation.val, W)
    mean = losses.mean(1)
    best = int(np.argmin(mean))
    difference = losses - losses[best]
    se = difference.std(1, ddof=1) / np.sqrt(losses.shape[1])
    estimated = _estimated(federation, solved, W, _shares(federation, weights), decay) if task.kind.least_squares else None
    return {
        "loss": mean.tolist(),
        "score": scores.mean(1).tolist(),
        "excess": (mean - mean[best]).tolist(),
        "se": se.tolist(),
        "distance": None if estimated is None else estimated[0].tolist(),
        "distance_of": None if estimated is None else [estimated[1]] * len(solved),
        "true": _true(task, federation, W),
    }


def _stacked(solved: Sequence[Solution]) -> Numbers:
    """Weights and bias side by side: [solutions, clients, outputs, columns]."""

    def table(model: Mapping[str, Tensor]) -> Tensor:
        parts = [model["weight"].double()]
        return torch.cat([*parts, model["bias"].double()[:, None]] if "bias" in model else parts, 1)

    return np.stack([torch.stack([table(model) for model in solution.models]).numpy() for solution in solved])


def _judge(task: Task, rows: Split, W: Numbers) -> tuple[Numbers, Numbers]:
    """Mean loss and score of every client on its rows, [solutions, clients]."""
    losses, scores = np.empty(W.shape[:2]), np.empty(W.shape[:2])
    for i in range(W.shape[1]):
        x, y = rows.client(i)
        design = _design(x, W.shape[3])
        out = torch.from_numpy(np.einsum("nd,lkd->lnk", design, W[:, i]))
        target = y.double() if y.is_floating_point() else y
        targets = target.repeat(len(out), *[1] * (target.dim() - 1))
        flat = out.reshape(-1, out.shape[-1])
        losses[:, i] = task.example_loss(flat, targets).reshape(len(out), -1).mean(1).numpy()
        scores[:, i] = task.kind.hits(flat, targets).reshape(len(out), -1).mean(1).numpy()
    return losses, scores


def _design(x: Tensor, columns: int) -> Numbers:
    rows = x.flatten(1).double().numpy()
    return rows if rows.shape[1] == columns else np.concatenate([rows, np.ones((len(rows), 1))], 1)


def _estimated(
    federation: Federation, solved: list[Solution], W: Numbers, p: Numbers, decay: float
) -> tuple[Numbers, int] | None:
    """Return an unbiased estimate of the mean squared distance to the truth, per solution, and of how many clients: those with
    rows to spare, whose own least-squares fits v_i exist. None where these are fewer than half.

    With A_i = H_i + decay + lam and P_i = A_i^-1 H_i, w_i = P_i v_i + lam A_i^-1 g and g = S^-1 sum p_j P_j v_j, where
    S = sum p_j (I - lam A_j^-1), so that Cov(w_i, v_i) = (P_i + lam A_i^-1 S^-1 p_i P_i) V_i.
    """
    m, outputs, columns = W.shape[1:]
    H, V, own_fits = np.empty((m, columns, columns)), np.zeros((m, columns, columns)), np.zeros((m, outputs, columns))
    estimable = []
    for i in range(m):
        x, y = federation.train.client(i)
        design, target = _design(x, columns), y.double().reshape(len(y), outputs).numpy()
        gram = design.T @ design
        H[i] = gram / (len(design) * outputs)
        if len(design) > columns and np.linalg.cond(design) < 1 / FLATTEST:
            own_fits[i] = np.linalg.lstsq(design, target)[0].T
            residual = ((target - design @ own_fits[i].T) ** 2).sum() / (len(design) - columns)  # over the outputs
            V[i] = residual * np.linalg.inv(gram)
            estimable.append(i)
    if 2 * len(estimable) < m:
        return None
    total = np.trace(V, axis1=1, axis2=2)
    eye, out = np.eye(columns), np.empty(len(solved))
    P: NDArray[Any]
    lam_inverse: NDArray[Any]
    for k, solution in enumerate(solved):
        lam = float(solution.lam[0])
        if np.isinf(lam):  # up to a factor 1/lam that cancels
            P, lam_inverse, S = H, np.broadcast_to(eye, H.shape), np.einsum("i,ijk->jk", p, H + decay * eye)
        else:
            inverse = np.linalg.inv(H + (decay + lam) * eye)
            P, lam_inverse = inverse @ H, lam * inverse
            S = np.einsum("i,ijk->jk", p, inverse @ (H + decay * eye))
        pooled = lam_inverse @ np.linalg.solve(S, p[:, None, None] * P)
        J = pooled if np.isinf(lam) else P + pooled
        distance = ((W[k] - own_fits) ** 2).sum((1, 2))
        out[k] = (distance - total + 2 * np.einsum("ijk,ikj->i", J, V))[estimable].mean()
    return out, len(estimable)


def _shares(federation: Federation, weights: str | Sequence[float]) -> Numbers:
    sizes = federation.train.sizes
    p = np.asarray(weights if not isinstance(weights, str) else np.ones(len(sizes)) if weights == "uniform" else sizes, float)
    return p / p.sum()


def _true(task: Task, federation: Federation, W: Numbers) -> list[float] | None:
    """Mean squared distance to the true parameters, where the federation has them."""
    if federation.truth is None or not all(fits(task, truth) for truth in federation.truth):
        return None
    truth = np.zeros(W.shape[1:])
    for i, model in enumerate(federation.truth):
        weight = model["weight"].double().numpy()
        truth[i, :, : weight.shape[1]] = weight
        if "bias" in model:
            truth[i, :, -1] = model["bias"].double().numpy()
    if task.kind.softmax:  # what is added to all classes alike changes no prediction
        truth -= truth.mean(1, keepdims=True)
    return [float(value) for value in ((W - truth) ** 2).sum((2, 3)).mean(1)]


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _cut(values: list[Any] | None, first: int, last: int) -> list[Any] | None:
    return None if values is None else values[first:last]
