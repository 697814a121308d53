"""The constants in which the papers state their theorems: strong convexity, smoothness, gradient noise, a bound on the loss.

For linear models mu and L are exact: the Hessian of a client's risk is X'DX/n with D between 0 and ``curvature``; least squares
has D = 1 exactly. Weight decay adds to both constants. mu is the smallest over the clients, L the largest: what a theorem needs
to hold for all. For other models ``estimate`` measures the curvature at one point. ``exact`` says which of the two it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from fedtailor import tree
from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument
from fedtailor.task import Task

_ROOM = 10_000_000  # numbers in a chunk of the records' gradients


@dataclass(frozen=True)
class Constants:
    mu: float
    smoothness: float
    exact: bool = True

    @property
    def kappa(self) -> float:
        return self.smoothness / self.mu


def constants(task: Task, federation: Federation, weight_decay: float = 0.0) -> Constants:
    """Return mu and L of the clients' training risks. Refuses a model that is not linear or not strongly convex."""
    if task.gradient is None:
        raise InvalidArgument("the constants mu and L are known for the model 'linear' only; give lr, server_lr and steps")
    outputs = task.kind.averaged(federation.outputs)
    smallest, largest = float("inf"), 0.0
    for i in range(len(federation)):
        x = federation.train.client(i)[0].flatten(1).double()
        if "bias" in task.init():
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        eigenvalues = torch.linalg.eigvalsh(x.T @ x / len(x)) / outputs
        smallest, largest = min(smallest, float(eigenvalues[0])), max(largest, float(eigenvalues[-1]))
    mu = max(smallest, 0.0) if task.kind.least_squares else 0.0  # a logistic risk flattens out: only decay bends it
    result = Constants(mu + weight_decay, task.kind.curvature * largest + weight_decay)
    if result.mu <= 1e-10 * result.smoothness:
        raise InvalidArgument(
            "a client's risk is not strongly convex (mu = 0), which the theory's step sizes need; "
            "add weight decay, for instance opt=ft.SGD(weight_decay=0.01), or give lr, server_lr and steps"
        )
    return result


def estimate(
    task: Task, federation: Federation, model: Mapping[str, Tensor], weight_decay: float = 0.0, steps: int = 50, seed: int = 0
) -> Constants:
    """Smallest and largest curvature of the clients' training risks at ``model``, for any task, by power iteration.

    Not the constants of a theorem: these hold everywhere, and what ``steps`` iterations see is less than the extremes even at
    this point (so ``exact`` is False). mu is negative where the risk is not convex there. For linear models use ``constants``.
    """
    if steps < 1:
        raise InvalidArgument(f"steps must be a whole number of at least 1, not {steps!r}")
    point = tree.trainable(model)
    rest = {name: value for name, value in model.items() if name not in point}
    lowest, largest = math.inf, -math.inf
    for i in range(len(federation)):
        x, y = federation.train.client(i)
        gradient = grad(lambda free, x=x, y=y: task.risk({**free, **rest}, {"x": x, "y": y}))
        pullback = vjp(gradient, point)[1]  # a Hessian is symmetric

        def hessian_times(v: dict[str, Tensor], pullback: Callable[..., Any] = pullback) -> dict[str, Tensor]:
            return pullback(v)[0]

        generator = torch.Generator().manual_seed(int(rng.mix(seed, i) >> 1))
        first = {name: torch.randn(w.shape, generator=generator, dtype=w.dtype) for name, w in point.items()}
        high = _dominant(hessian_times, first, steps)
        bound = abs(high)  # shifted by the dominant one, the other end of the spectrum dominates
        low = high if bound == 0 else bound + _dominant(lambda v, b=bound, f=hessian_times: tree.add(f(v), v, -b), first, steps)
        top = high if high > 0 else -bound + _dominant(lambda v, b=bound, f=hessian_times: tree.add(f(v), v, b), first, steps)
        lowest, largest = min(lowest, low, high), max(largest, top)
    return Constants(lowest + weight_decay, largest + weight_decay, exact=False)


def _dominant(product: Callable[..., dict[str, Tensor]], v: dict[str, Tensor], steps: int) -> float:
    """Return the eigenvalue of largest modulus: the Rayleigh quotient after ``steps`` products with the matrix."""
    for _ in range(steps):
        length = float(tree.dot(v, v)) ** 0.5
        if not length:
            return 0.0
        v = product(tree.scale(v, 1 / length))
    length = float(tree.dot(v, v)) ** 0.5
    if not length:
        return 0.0
    v = tree.scale(v, 1 / length)
    return float(tree.dot(v, product(v)))


@dataclass(frozen=True)
class Noise:
    """``rho2``: the largest over clients of the mean squared gradient of a record (CLUP Assumption 3, MINIMAX A(c): at w*_i).
    ``sigma2``: the same of its distance from the client's mean gradient (a batch of B has sigma2/B). ``exact`` says that the
    points were the true parameters; both are means over the training rows, which stand for the distribution."""

    rho2: float
    sigma2: float
    exact: bool


def noise(task: Task, federation: Federation, models: Sequence[Mapping[str, Tensor]] | None = None) -> Noise:
    """Return the gradients' noise at ``models``, one per client; without them at the true parameters, where the federation has
    them."""
    exact = models is None
    if models is None:
        if federation.truth is None:
            raise InvalidArgument("the federation does not know its true parameters; give models=, one per client")
        models = [_truth_as_model(task, truth) for truth in federation.truth]
    if len(models) != len(federation):
        raise InvalidArgument(f"{len(models)} models for {len(federation)} clients; give one per client")
    rho2 = sigma2 = 0.0
    for i, model in enumerate(models):
        x, y = federation.train.client(i)
        point = {name: value.double() for name, value in model.items()}
        rows, targets = x.double() if x.is_floating_point() else x, y.double() if y.is_floating_point() else y
        free, rest = tree.trainable(point), {k: v for k, v in point.items() if k.startswith(tree.BUFFER)}

        def row_loss(w: dict[str, Tensor], a: Tensor, b: Tensor, rest: dict[str, Tensor] = rest) -> Tensor:
            return task.example_loss(task.apply({**w, **rest}, a[None]), b[None])[0]

        mean_square, mean = 0.0, torch.zeros(tree.size(free), dtype=torch.float64)
        for chunk in torch.arange(len(y)).split(max(1, _ROOM // tree.size(free))):
            parts = vmap(grad(row_loss), (None, 0, 0))(free, rows[chunk], targets[chunk])
            gradients = torch.cat([leaf.flatten(1) for leaf in parts.values()], 1)
            mean_square += float((gradients**2).sum()) / len(y)
            mean += gradients.sum(0) / len(y)
        rho2, sigma2 = max(rho2, mean_square), max(sigma2, mean_square - float(mean @ mean))
    return Noise(rho2, sigma2, exact)


def _truth_as_model(task: Task, truth: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = task.init()
    if not set(truth) <= set(start) or any(start[name].shape != leaf.shape for name, leaf in truth.items()):
        raise InvalidArgument("the true parameters are not a model of this task; give models=, one per client")
    return {name: truth.get(name, torch.zeros_like(leaf)) for name, leaf in start.items()}


def record_smoothness(task: Task, federation: Federation, weight_decay: float = 0.0) -> float:
    """MINIMAX's beta, CLUP's Assumption 1: the smoothness of the loss on any single training or test record (linear models)."""
    squares, outputs = _squared_lengths(task, federation), task.kind.averaged(federation.outputs)
    return task.kind.curvature / outputs * float(squares.max()) + weight_decay


def loss_bound(task: Task, federation: Federation, radius: float) -> float:
    """MINIMAX's bound on the loss: its largest value on any training or test record over all linear models no longer than
    ``radius`` (for a softmax, and for several outputs, an upper bound on that)."""
    if not 0 <= radius < math.inf:
        raise InvalidArgument(
            f"radius must be a finite number of at least 0, not {radius!r}; give the length of the longest model"
        )
    reach = radius * _squared_lengths(task, federation).sqrt()
    if task.kind.softmax:  # logits of two classes differ by at most sqrt(2) |W| |x|
        worst = torch.log1p((federation.outputs - 1) * torch.exp(math.sqrt(2) * reach))
    elif task.kind.least_squares:
        targets = torch.cat([federation.train.y, federation.test.y]).double().reshape(len(reach), -1)
        worst = (targets.norm(dim=1) + reach) ** 2 / (2 * federation.outputs)
    else:
        worst = torch.nn.functional.softplus(reach)
    return float(worst.max())


def _squared_lengths(task: Task, federation: Federation) -> Tensor:
    """Return the squared lengths of all training and test rows, the bias's constant 1 included."""
    if task.gradient is None:
        raise InvalidArgument("the loss of one record has known bounds for the model 'linear' only; give the number itself")
    rows = torch.cat([federation.train.x, federation.test.x]).flatten(1).double()
    return (rows**2).sum(1) + ("bias" in task.init())
