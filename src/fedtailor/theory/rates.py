"""Step sizes and rates that the papers prove, and ``resolve``, which puts them in the place of words such as "theory"."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.scaffoldp import ScaffoldP
from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument
from fedtailor.local import SGD, Private, gradient_on
from fedtailor.task import Task
from fedtailor.theory.constants import CURVATURE, Constants, constants
from fedtailor.theory.partial import PartialSteps, fedavgp_full, fedavgp_partial, scaffoldp_partial


class Steps(NamedTuple):
    lr: float
    server_lr: float
    steps: int


def fedclup_steps(lam: float, mu: float, smoothness: float) -> Steps:
    """CLUP Corollary 2: eta = 1/(lam + L), gamma = (lam + L)/(2 lam L), K >= 2 + (lam + L)/(lam + mu) log(1056 kappa^2)."""
    if lam <= 0:
        raise InvalidArgument("steps='theory' needs lam > 0 (with lam = 0 nothing is shared; use Local)")
    kappa = smoothness / mu
    local = 2 + (lam + smoothness) / (lam + mu) * math.log(1056 * kappa**2)
    return Steps(1 / (lam + smoothness), (lam + smoothness) / (2 * lam * smoothness), math.ceil(local))


def fedclup_rate(lam: float, mu: float, smoothness: float) -> float:
    """CLUP Corollary 2: factor by which the squared error of g falls per round."""
    return 1 - (lam + smoothness) / (4 * smoothness / mu * (lam + mu))


def resolve(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    rounds: int = 1,
    cohort: int | None = None,
    batch_size: int | None = None,
    weights: str = "uniform",
) -> tuple[Algorithm, Constants | None]:
    """An algorithm that asks for the theory's steps, or for a step that depends on the clients, with them filled in.

    ``rounds``, ``cohort`` (the number of clients per round; None: all) and the rest are those of the run.
    """
    if isinstance(algorithm.opt, Private) and "theory" in (algorithm.lr, algorithm.steps):
        raise InvalidArgument("the theory's step sizes are read off the clients' rows, which is not private; give lr and steps")
    if isinstance(algorithm.lr, str):
        found = _partial_steps(algorithm, task, federation, rounds, cohort or len(federation), batch_size, weights)
        return replace(algorithm, **found.options), None  # type: ignore[arg-type]
    lam: Any = getattr(algorithm, "lam", None)
    if algorithm.steps != "theory":
        return (_with_server_step(algorithm, federation, weights) if lam == "client" else algorithm), None
    if lam == "client":
        raise InvalidArgument("steps='theory' is proved for one lam for all; with lam='client' give lr and steps")
    known = constants(task, federation, algorithm.opt.weight_decay)
    if "smoothness" in {f.name for f in fields(algorithm)}:  # the method works out its steps from the constants
        return replace(algorithm, steps=None, mu=known.mu, smoothness=known.smoothness), known  # type: ignore[call-arg]
    return replace(algorithm, **fedclup_steps(lam, known.mu, known.smoothness)._asdict()), known


def _with_server_step(algorithm: Any, federation: Federation, weights: str) -> Algorithm:
    """server_lr = 1/(sum of p_i lam_i): the gradient of Problem (19)'s envelope is Lipschitz with less than that sum."""
    lams = federation.facts.get("lam")
    if lams is None:
        return algorithm  # the method refuses by itself
    if (lams < 0).any():
        client = federation.names[int(np.flatnonzero(lams < 0)[0])]
        raise InvalidArgument(f"the lam of client {client} is negative; give numbers of at least 0 to with_facts(lam=...)")
    if algorithm.server_lr is not None:
        return algorithm
    sizes = federation.train.sizes
    equal = bool((lams == lams[0]).all())  # their mean may differ from them in the last digit
    mean = float(lams[0] if equal else np.average(lams, weights=sizes if weights == "size" else None))
    return replace(algorithm, server_lr=1 / mean if mean else 1.0)


# -- PARTIAL's steps for a model that is linear in (u, v) ------------------------------------------------------------------
class Split(NamedTuple):
    """What PARTIAL's theorems ask about a problem with a shared part u and a personal part v.

    ``b2`` and the variances hold at every point; they are infinite for least squares, whose gradients have no bound (a variance
    is 0 with full batches).
    """

    L: float
    gap: float
    start2: float
    sigma_u2: float
    sigma_v2: float
    b2: float


def split_constants(
    task: Task, federation: Federation, mine: Collection[str], batch_size: int | None = None, weight_decay: float = 0.0
) -> Split:
    """The constants for the personal part ``mine``, for the models ``linear`` and ``split-linear``.

    With rows a (that meet u) and b (that meet v), L = curvature * max over clients of the larger of |A'A/n| and |B'B/n|: the
    Hessian is positive semi-definite, so its mixed block is never larger. The loss is at least 0, so f at the start serves as
    ``gap``. A row's gradient in u is at most slope |a|; b^2 is bounded by the clients' mean square of that, a batch's variance by
    the rows' mean square over the size of the smallest batch. Batches are taken as independent draws, as in the paper (ours are
    without replacement within an epoch).
    """
    curvature, slope2 = _loss_bounds(task, federation)
    start = task.init()
    largest = {"u": 0.0, "v": 0.0}
    noise = {"u": 0.0, "v": 0.0}
    gap = start2 = b2 = 0.0
    for i in range(len(federation)):
        x, y = federation.train.client(i)
        columns = _columns(task, x) or {}
        parts = {
            "u": _joined([c for name, c in columns.items() if name not in mine], x),
            "v": _joined([c for name, c in columns.items() if name in mine], x),
        }
        for part, rows in parts.items():
            if not rows.shape[1]:
                continue
            largest[part] = max(largest[part], float(torch.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]))
            if batch_size is not None and len(y) > batch_size:
                least = len(y) % batch_size or batch_size
                noise[part] = max(noise[part], slope2 * float((rows**2).sum(1).mean()) / least)
        if parts["u"].shape[1]:
            b2 += slope2 * float(parts["u"].norm(dim=1).mean()) ** 2 / len(federation)
        batch = {"x": x, "y": y}
        slope = tree.add(gradient_on(task.risk, start, batch), start, weight_decay)
        start2 += float(sum((g.double() ** 2).sum() for g in tree.drop(slope, mine).values())) / len(federation)
        gap += float(task.risk(start, batch)) / len(federation)
    gap += weight_decay / 2 * float(sum((w.double() ** 2).sum() for w in start.values()))
    return Split(curvature * max(largest.values()) + weight_decay, gap, start2, noise["u"], noise["v"], b2)


def _loss_bounds(task: Task, federation: Federation) -> tuple[float, float]:
    """(largest curvature, largest squared slope) of the loss in the logits. Refuses a model that is not linear."""
    x = federation.train.x[:8]
    columns = _columns(task, x)
    if columns is not None:
        draw = torch.Generator().manual_seed(0)
        point = {name: torch.randn(w.shape, generator=draw, dtype=torch.float64).to(w) for name, w in task.init().items()}
        wanted = sum(c @ point[name].double().reshape(len(point[name]), -1).T for name, c in columns.items())
        with torch.no_grad():
            logits = task.apply(point, x).double()
        split = "common.weight" in columns
        if torch.allclose(logits[:, 1:] - logits[:, :1] if split else logits, torch.as_tensor(wanted), rtol=1e-4, atol=1e-4):
            if split:
                return 0.25, 1.0  # one logit
            outputs = 1 if task.kind == "classification" else federation.outputs
            slope2 = {"classification": 2.0, "multilabel": 1 / outputs, "regression": math.inf}[task.kind]
            return CURVATURE[task.kind] / outputs, slope2
    raise InvalidArgument(
        "lr='theory' needs the smoothness of the risks, known for the models 'linear' and 'split-linear' only; give lr a number"
    )


def _columns(task: Task, x: Tensor) -> dict[str, Tensor] | None:
    """For each parameter the columns of the rows that it is multiplied with; None for a model of another shape."""
    rows, start = x.flatten(1).double(), task.init()
    names = set(start)
    if "weight" in names <= {"weight", "bias"} and start["weight"].shape[1:] == rows.shape[1:]:
        return {name: rows if name == "weight" else rows.new_ones(len(rows), 1) for name in start}
    if names == {"common.weight", "features.weight"}:
        cut = start["common.weight"].shape[1]
        return {"common.weight": rows[:, :cut], "features.weight": rows[:, cut:]}
    return None


def _joined(columns: list[Tensor], x: Tensor) -> Tensor:
    return torch.cat(columns, 1) if columns else x.new_zeros(len(x), 0, dtype=torch.float64)


def _partial_steps(
    algorithm: Any, task: Task, federation: Federation, rounds: int, m: int, batch_size: int | None, weights: str
) -> PartialSteps:
    """The steps of FedAvg-P or Scaffold-P: Theorem 3.11 where all take part, else Corollary 3.8 (Theorem 3.7 where b^2 has no
    bound); Corollary 4.6, which is Theorem 4.5 without noise."""
    name, sizes = type(algorithm).__name__, federation.train.sizes
    if weights == "size" and len(set(sizes.tolist())) > 1:
        raise InvalidArgument(f"{name}: lr='theory' is proved for plain means over clients; use weights='uniform'")
    if type(algorithm.opt) is not SGD or algorithm.opt.momentum or algorithm.radius is not None:
        raise InvalidArgument(f"{name}: lr='theory' is proved for plain SGD; leave out momentum, Adam and radius")
    if algorithm.personal_lr is not None or algorithm.server_lr != 1.0 or algorithm.personal_server_lr != 1.0:
        raise InvalidArgument(f"{name}: lr='theory' sets all step sizes; leave out personal_lr, server_lr and personal_server_lr")
    counts = algorithm.work()["train"].count(sizes, batch_size)
    if counts.min() != counts.max():
        raise InvalidArgument(f"{name}: lr='theory' needs the same number of local steps at every client; give steps=")
    found = split_constants(task, federation, algorithm.mine(task), batch_size, algorithm.opt.weight_decay)
    noise = {"sigma_u2": found.sigma_u2, "sigma_v2": found.sigma_v2}
    if not all(map(math.isfinite, noise.values())):
        raise InvalidArgument(
            f"{name}: for lr='theory' the noise of mini-batches needs a bound, least squares has none; use batch_size=None"
        )
    L, K, n = found.L, int(counts[0]), len(federation)
    if isinstance(algorithm, ScaffoldP):
        if algorithm.first != "gradients":
            raise InvalidArgument("ScaffoldP: lr='theory' is proved for first='gradients'; leave out first")
        return scaffoldp_partial(L, K, m, n, max(1, rounds - 1), found.gap, **noise)  # round 0 is the roll call
    if m == n:
        return fedavgp_full(L, K, n, rounds, found.gap, found.start2, **noise)
    if math.isinf(found.b2):
        return fedavgp_partial(L, K, m, n)
    return fedavgp_partial(L, K, m, n, rounds, found.gap, b2=found.b2, **noise)
