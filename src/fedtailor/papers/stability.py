"""Federated stability (MINIMAX Definition 5): how much client i's loss on a record moves when one of i's own is replaced.

The definition takes the largest over all records to replace, all replacements and all records to be judged on; a measurement
tries some of each, so it is a lower bound on gamma_i, to be held against the theorem's upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.data.split import Split
from fedtailor.errors import InvalidArgument
from fedtailor.papers.minimax_theory import check_tie
from fedtailor.task import Task
from fedtailor.theory.envelope import Lam, solve

Solver = Callable[[Federation], Sequence[Mapping[str, Tensor]]]


@dataclass(frozen=True)
class Stability:
    """``gamma`` holds one number per client that was looked at, in the order of ``clients``."""

    clients: tuple[int, ...]
    gamma: NDArray[np.float64]
    replaced: int  # records tried per client


def replace_record(federation: Federation, client: int, row: int, x: Tensor, y: Tensor) -> Federation:
    """Return the same federation with record ``row`` of the client's training rows replaced by (x, y): S with (i, j)
    exchanged."""
    client = federation.index(client)
    train = federation.train
    if not 0 <= row < train.sizes[client]:
        raise InvalidArgument(f"client {federation.names[client]} has no row {row}; it has {train.sizes[client]}, counted from 0")
    at = int(train.offsets[client]) + row
    rows, targets = train.x.clone(), train.y.clone()
    rows[at], targets[at] = x, y
    return replace(federation, train=Split(rows, targets, train.offsets))


def envelope_solver(task: Task, lam: Lam, weights: str | Sequence[float] = "uniform", weight_decay: float = 0.0) -> Solver:
    """Return the exact minimum of Problem (2) as a method to be measured; it begins at the last solution, so a small change is
    cheap."""
    last = None

    def run(federation: Federation) -> Sequence[Mapping[str, Tensor]]:
        nonlocal last
        last = solve(task, federation, lam, weights=weights, weight_decay=weight_decay, start=last)
        return last.models

    return run


def federated_stability(
    method: Solver,
    task: Task,
    federation: Federation,
    *,
    clients: Sequence[int] | None = None,
    records: int = 3,
    seed: int = 0,
) -> Stability:
    """gamma_i as measured: for each client, ``records`` of its training records are replaced in turn, by one of its test records,
    and the largest change of its model's loss over all its training and test records is kept.

    ``method`` is a function from a federation to one model per client, for instance ``envelope_solver(task, lam)``, or a run:
    ``lambda fed: [ft.run(..., fed, ...).model(i) for i in range(len(fed))]``.
    """
    if records < 1:
        raise InvalidArgument(f"records must be a whole number of at least 1, not {records!r}")
    chosen_clients = tuple(federation.index(i) for i in (range(len(federation)) if clients is None else clients))
    before = method(federation)
    gammas = []
    for i in chosen_clients:
        generator = rng.generator(seed, "stability", int(federation.keys[i] >> np.uint64(1)))
        (x, y), (fresh, labels) = federation.train.client(i), federation.test.client(i)
        replaced_rows = generator.choice(len(y), min(records, len(y)), replace=False)
        largest_change = 0.0
        for row in replaced_rows:
            new = int(generator.integers(len(labels)))
            after = method(replace_record(federation, i, int(row), fresh[new], labels[new]))
            probes, answers = torch.cat([x, fresh]), torch.cat([y, labels])
            largest_change = max(largest_change, _change(task, before[i], after[i], probes, answers))
        gammas.append(largest_change)
    return Stability(chosen_clients, np.array(gammas), records)


def _change(task: Task, before: Mapping[str, Tensor], after: Mapping[str, Tensor], x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        losses = [
            task.example_loss(task.apply(dict(model), x.to(next(iter(model.values())).dtype)), y) for model in (before, after)
        ]
    return float((losses[0] - losses[1]).abs().max())


# -- proved bounds ----------------------------------------------------------------------------------------------------------
def fedprox_stability(
    mu: float,
    beta: float,
    loss: float,
    lam: float,
    n: int,
    share: float,
    global_error: float = 0.0,
    local_error: float = 0.0,
) -> float:
    """Proposition 21: gamma_i <= 160 beta loss/(n_i (mu + lam)) + Err_i, for a point within ``global_error`` of Problem (2)'s g
    and within ``local_error`` of the prox at it (both 0 at the exact minimum, where Err_i is 0).

    ``share`` is p_i. Holds where n_i >= 4 beta/mu and p_i lam <= mu/16.
    """
    _positive(mu=mu, beta=beta, loss=loss, n=n, share=share)
    if min(lam, global_error, local_error) < 0 or not math.isfinite(lam + global_error + local_error):
        raise InvalidArgument("lam and the errors must be finite and at least 0; give 0 for an exact minimum")
    check_tie(mu, beta, lam, n, share)
    outer = global_error * 4 * ((beta + lam) / (mu + lam) + 3 * lam / mu)
    inner = local_error * (math.sqrt((beta + lam) / (mu + lam)) + 16 * share * lam / mu)
    error = 2 * math.sqrt(2 * beta * loss) * (outer + inner) + 8 * beta**2 * (outer**2 + inner**2)
    return 160 * beta * loss / (n * (mu + lam)) + error


def fedavg_stability(mu: float, beta: float, loss: float, n: int, share: float, c: float = 1.0) -> float:
    """Return the stability of the pooled minimum: c beta loss p_i/(mu n_i), up to a constant that the paper leaves open (Theorem
    6)."""
    _positive(mu=mu, beta=beta, loss=loss, n=n, share=share, c=c)
    return c * beta * loss * share / (mu * n)


def local_stability(mu: float, beta: float, loss: float, n: int, c: float = 1.0) -> float:
    """Return the stability of local training: c beta loss/(mu n_i), again up to a constant (proof of Theorem 4)."""
    _positive(mu=mu, beta=beta, loss=loss, n=n, c=c)
    return c * beta * loss / (mu * n)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise InvalidArgument(f"{name} must be finite and greater than 0, not {value!r}")
