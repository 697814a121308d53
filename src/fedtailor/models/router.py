"""The routing network of Flow: a chain of fully connected layers on the input, with an exit per route (FLOW Eq. (2), Figure 1).

Level j of the base is h_j = relu(W_j h_(j-1) + b_j), h_0 the flattened input; exit j is a linear map of h_j to two scores, and
q^(j) = softmax(scores): q_0 is the probability of the global path, q_1 that of the local one. Where there are more routes than
levels, the last exits read the last level; a router with one exit (that of a recurrent model) may have any number of levels. With
one level less than routes this is the network of the authors' EMNIST and CIFAR experiments, whose last base layer is its own
exit.

The parameters are a flat dict, so that they can travel as part of a shared tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtailor.errors import InvalidArgument
from fedtailor.task.layers import uniform

NARROWEST = 8  # the smallest width chosen by default
STREAM = 2**33  # of random numbers: beyond those of the model's dropouts and of other methods' noise


def default_widths(inputs: int, routes: int) -> tuple[int, ...]:
    """Return a width per route: twice the square root of the inputs wide, then each half as wide as the one before."""
    first = 2 * math.isqrt(inputs)
    return tuple(max(NARROWEST, first // 2**j) for j in range(routes))


def shapes(inputs: int, routes: int, widths: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the parameters."""
    if len(widths) > routes > 1:
        raise InvalidArgument(f"a router for {routes} routes has at most {routes} levels, not {len(widths)}; give fewer widths")
    levels = [inputs, *widths]
    out: dict[str, tuple[int, ...]] = {}
    for j, (before, width) in enumerate(zip(levels, widths, strict=False), 1):
        out |= {f"base.{j}.weight": (width, before), f"base.{j}.bias": (width,)}
    for j in range(1, routes + 1):
        out |= {f"exit.{j}.weight": (2, levels[-1 if j == routes else min(j, len(widths))]), f"exit.{j}.bias": (2,)}
    return out


def size(inputs: int, routes: int, widths: Sequence[int]) -> int:
    """Return the number of parameters of a router."""
    return sum(math.prod(shape) for shape in shapes(inputs, routes, widths).values())


def init(
    inputs: int, routes: int, widths: Sequence[int] | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return random parameters that depend on the seed alone: uniform within 1/sqrt(inputs of the layer), as in ``nn.Linear``."""
    chosen = default_widths(inputs, routes) if widths is None else widths
    draw = torch.Generator().manual_seed(seed)
    layout = shapes(inputs, routes, chosen)
    out = {}
    for name, shape in layout.items():
        bound = layout[name.rsplit(".", 1)[0] + ".weight"][1] ** -0.5
        out[name] = (bound * (2 * torch.rand(shape, generator=draw, dtype=torch.float64) - 1)).to(dtype)
    return out


def scores(
    params: Mapping[str, Tensor], x: Tensor, dropout: float = 0.0, key: Tensor | None = None, row: Tensor | None = None
) -> Tensor:
    """Return the scores before the softmax, [rows, routes, 2]. With a step's ``key`` the levels are thinned by ``dropout``;
    ``row`` is the position in the batch if x is a single row of it."""
    h = x.flatten(1).to(params["exit.1.weight"].dtype)
    routes = sum(name.startswith("exit.") and name.endswith(".weight") for name in params)
    exit_scores = []
    levels = sum(name.startswith("base.") and name.endswith(".weight") for name in params)
    for j in range(1, max(routes, levels) + 1):
        if f"base.{j}.weight" in params:
            h = torch.relu(F.linear(h, params[f"base.{j}.weight"], params[f"base.{j}.bias"]))
            if dropout and key is not None:
                first = 0 if row is None else row * h.shape[1]
                h = h * (uniform(key, STREAM + j, h.shape, first, h.device) >= dropout).to(h) / (1 - dropout)
        if j < routes or j == max(routes, levels):
            k = min(j, routes)
            exit_scores.append(F.linear(h, params[f"exit.{k}.weight"], params[f"exit.{k}.bias"]))
    return torch.stack(exit_scores, 1)


def apply(params: Mapping[str, Tensor], x: Tensor, dropout: float = 0.0, key: Tensor | None = None) -> Tensor:
    """Return q [rows, routes, 2] = [global, local]."""
    return torch.softmax(scores(params, x, dropout, key), -1)
