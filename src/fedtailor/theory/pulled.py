"""The problem that ``envelope`` solves: clients' rows in padded groups, and their risks, gradients and Hessians at any point."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument
from fedtailor.task import Kind, Task

ROOM = 20_000_000  # numbers of a chunk of Hessians (8 bytes each)


class Group(NamedTuple):
    """Clients of like size: rows [c, n, D] padded with zeros, targets [c, n, K], ``share`` [c, n] = 1/n_i on real rows."""

    ids: Tensor
    rows: Tensor
    targets: Tensor
    share: Tensor


@dataclass(frozen=True, eq=False)
class Problem:
    """Parameters are [blocks, size]: blocks that the Hessian does not mix. Outputs are apart except under a softmax.

    ``contrasts`` [outputs, free] turns them into one row of weights per output. ``diagonal`` [clients, blocks, size] is that of
    the Hessians at zero, without decay (nothing for least squares, whose curvature does not vanish on the way).
    """

    kind: Kind
    groups: list[Group]
    names: tuple[str, ...]
    weights: Tensor
    contrasts: Tensor
    columns: int
    bias: bool
    weight_decay: float
    diagonal: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        free = self.contrasts.shape[1]
        return (1, free * self.columns) if self.kind.softmax else (free, self.columns)

    def table(self, flat: Tensor) -> Tensor:
        """[..., blocks, size] as weights [..., outputs, columns]."""
        return self.contrasts @ flat.reshape(*flat.shape[:-2], -1, self.columns)

    def model(self, flat: Tensor) -> dict[str, Tensor]:
        table = self.table(flat)
        return {"weight": table[:, :-1].clone(), "bias": table[:, -1].clone()} if self.bias else {"weight": table}


def problem_of(task: Task, federation: Federation, weights: str | Sequence[float], weight_decay: float) -> Problem:
    if not isinstance(federation, Federation):
        raise InvalidArgument(f"federation must be a Federation, not {type(federation).__name__}; see Federation.from_arrays")
    if task.gradient is None:
        raise InvalidArgument(
            "Problem (2) has one known minimum for the model 'linear' only (a network is not convex); train with FedCLUP instead"
        )
    if task.kind != federation.kind:
        raise InvalidArgument(f"the task is for {task.kind} but the data are for {federation.kind}; build it for these data")
    if isinstance(weight_decay, bool) or not isinstance(weight_decay, Real) or not 0 <= weight_decay < math.inf:
        raise InvalidArgument(f"weight_decay must be a finite number of at least 0, not {weight_decay!r}")
    start = task.init()
    outputs, bias = len(start["weight"]), "bias" in start
    columns = start["weight"].shape[1] + bias
    groups = [_padded_group(federation, ids, task.kind, outputs, bias) for ids in _size_groups(federation.train.sizes, columns)]
    shares = torch.from_numpy(_shares(weights, federation))
    contrasts = _contrasts(outputs) if task.kind.softmax else torch.eye(outputs, dtype=torch.float64)
    free = contrasts.shape[1]
    squares = shares.new_empty(len(federation), 1, columns)
    for group in groups:
        squares[group.ids] = group.share[:, None] @ group.rows**2
    per_row = (0.0 if task.kind.least_squares else 1.0 if task.kind.softmax else task.kind.curvature) / outputs
    diagonal = (per_row * squares).repeat(1, 1, free) if task.kind.softmax else (per_row * squares).repeat(1, free, 1)
    return Problem(task.kind, groups, federation.names, shares, contrasts, columns, bias, float(weight_decay), diagonal)


def _contrasts(outputs: int) -> Tensor:
    """[K, K - 1] orthonormal columns that sum to zero."""
    lower = torch.tril(torch.ones(outputs, outputs - 1, dtype=torch.float64), -1)
    steps = lower - lower.mean(0)
    return torch.linalg.qr(steps)[0]


def _size_groups(sizes: NDArray[np.int64], columns: int) -> Iterator[NDArray[np.int64]]:
    """Yield clients in groups within a factor of two in size, each of at most ``ROOM`` padded numbers."""
    bucket = np.ceil(np.log2(np.maximum(sizes, 1))).astype(int)
    for value in np.unique(bucket):
        ids = np.flatnonzero(bucket == value)
        room = max(1, ROOM // int(sizes[ids].max() * columns))
        for first in range(0, len(ids), room):
            yield ids[first : first + room]


def _padded_group(federation: Federation, ids: NDArray[np.int64], kind: Kind, outputs: int, bias: bool) -> Group:
    longest = int(federation.train.sizes[ids].max())
    rows, targets, share = [], [], []
    for i in ids:
        x, y = federation.train.client(int(i))
        table = x.flatten(1).double()
        if bias:
            table = torch.cat([table, table.new_ones(len(table), 1)], 1)
        target = torch.nn.functional.one_hot(y, outputs) if kind.softmax else y.reshape(len(y), outputs)
        pad = longest - len(y)
        rows.append(torch.cat([table, table.new_zeros(pad, table.shape[1])]))
        targets.append(torch.cat([target.double(), table.new_zeros(pad, outputs)]))
        share.append(torch.cat([table.new_full((len(y),), 1 / len(y)), table.new_zeros(pad)]))
    return Group(torch.from_numpy(ids), torch.stack(rows), torch.stack(targets), torch.stack(share))


def _shares(weights: str | Sequence[float], federation: Federation) -> NDArray[np.float64]:
    if isinstance(weights, str):
        if weights not in ("uniform", "size"):
            raise InvalidArgument(f"weights must be 'uniform', 'size' or a number per client, not {weights!r}")
        values = federation.train.sizes.astype(float) if weights == "size" else np.ones(len(federation))
    else:
        values = _numbers("weights", weights, len(federation))
    if not (np.isfinite(values) & (values > 0)).all():
        raise InvalidArgument("weights must be finite and greater than 0; leave a client out with federation.take([...])")
    return values / values.sum()


def lam_per_client(lam: Any, federation: Federation) -> NDArray[np.float64]:
    if isinstance(lam, str):
        if lam != "client" or "lam" not in federation.facts:
            raise InvalidArgument(f"lam = {lam!r} is not known; give a number, or 'client' after federation.with_facts(lam=...)")
        lam = federation.facts["lam"]
    values = np.full(len(federation), float(lam)) if isinstance(lam, Real) else _numbers("lam", lam, len(federation))
    if not (values >= 0).all():
        raise InvalidArgument(f"lam must be at least 0, not {values[~(values >= 0)][0]}; 0 is local training, inf one model")
    return values


def _numbers(name: str, argument: Any, count: int) -> NDArray[np.float64]:
    try:
        values = np.asarray(argument, float)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} must be numbers, not {argument!r}; give one per client") from error
    if values.shape != (count,):
        raise InvalidArgument(f"{name} has shape {values.shape} but there are {count} clients; give one number per client")
    return values


def risks(problem: Problem, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return f_i [m] and grad f_i [m, blocks, size] at every client's own point [m, blocks, size]."""
    values = flat.new_empty(len(flat))
    slopes = torch.empty_like(flat)
    for group in problem.groups:
        logits = group.rows @ problem.table(flat[group.ids]).transpose(-1, -2)
        losses, residual = _loss(problem.kind, logits, group.targets)
        values[group.ids] = (losses * group.share).sum(1)
        residual = residual * group.share[..., None] @ problem.contrasts
        slopes[group.ids] = (residual.transpose(-1, -2) @ group.rows).reshape(-1, *problem.shape)
    decay = problem.weight_decay
    return values + decay / 2 * (flat**2).sum((1, 2)), slopes + decay * flat


def hessians_of(problem: Problem, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (ids [c], Hessians [c, blocks, size, size]) in chunks; one block stands for all outputs of least squares."""
    blocks, size = problem.shape
    for group in problem.groups:
        room = max(1, ROOM // (blocks * size * size))
        for first in range(0, len(group.ids), room):
            part = Group(*(t[first : first + room] for t in group))
            logits = part.rows @ problem.table(flat[part.ids]).transpose(-1, -2)
            yield part.ids, _hessian(problem, part, logits) + problem.weight_decay * torch.eye(size, dtype=torch.float64)


def _hessian(problem: Problem, part: Group, logits: Tensor) -> Tensor:
    clients, _, outputs = logits.shape
    if problem.kind.least_squares:
        return _weighted_moments(part, torch.ones_like(part.share) / outputs)[:, None]
    if not problem.kind.softmax:
        weights = torch.sigmoid(logits) * torch.sigmoid(-logits) / outputs
        return torch.stack([_weighted_moments(part, weights[..., k]) for k in range(outputs)], 1)
    probabilities = torch.softmax(logits, -1)
    free, columns = problem.contrasts.shape[1], problem.columns
    centered = probabilities @ problem.contrasts
    out = logits.new_empty(clients, free, columns, free, columns)
    for a in range(free):
        for b in range(a + 1):
            weight = probabilities @ (problem.contrasts[:, a] * problem.contrasts[:, b]) - centered[..., a] * centered[..., b]
            out[:, a, :, b, :] = out[:, b, :, a, :] = _weighted_moments(part, weight)
    return out.view(clients, 1, free * columns, free * columns)


def _weighted_moments(part: Group, weights: Tensor) -> Tensor:
    """Return the sum over rows of share * weight * x x'."""
    return (part.rows * (weights * part.share)[..., None]).transpose(-1, -2) @ part.rows


def _loss(kind: Kind, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss and its gradient in the logits."""
    residual = (kind.soft(logits) - targets) / kind.averaged(logits.shape[-1])
    if kind.least_squares:
        return ((logits - targets) ** 2).mean(-1) / 2, residual
    if kind.softmax:
        return torch.logsumexp(logits, -1) - (targets * logits).sum(-1), residual
    return (torch.nn.functional.softplus(logits) - targets * logits).mean(-1), residual
