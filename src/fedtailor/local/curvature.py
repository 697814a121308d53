"""Second-order local work: products of a risk's Hessian with a vector, and linear systems solved by nothing but such products.

Both are functions of trees and work on both engines: on one client's batches, and under vmap on padded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp

from fedtailor import tree
from fedtailor.local.loop import Risk, no_rows, rows_of, scan


def hvp_on(risk: Risk, params: Any, batch: Mapping[str, Any], vector: Any) -> Any:
    """Return the Hessian of ``risk`` on one batch, at ``params``, times ``vector`` (a tree like ``params``; buffers: zero)."""
    free = {path: leaf for path, leaf in tree.items(params) if not tree.is_buffer(path)}
    direction = tuple(leaf for path, leaf in tree.items(vector) if path in free)

    def gradient_at(*leaves: Tensor) -> tuple[Tensor, ...]:
        new_leaves = dict(zip(free, leaves, strict=True))
        gradients = grad(risk)(tree.refill(params, (new_leaves.get(path, leaf) for path, leaf in tree.items(params))), batch)
        return tuple(leaf for path, leaf in tree.items(gradients) if path in free)

    product = vjp(gradient_at, *free.values())[1](direction)  # v'H is (Hv)': the Hessian is symmetric
    by_path = dict(zip(free, product, strict=True))
    return tree.refill(params, (by_path[path] if path in free else torch.zeros_like(leaf) for path, leaf in tree.items(params)))


def hvp(risk: Risk, params: Any, data: Any, vector: Any) -> Any:
    """Return ``hvp_on`` for all of a client's batches: their mean, weighted by rows (or real positions)."""

    def step(carry: Any, batch: Mapping[str, Any]) -> Any:
        rows = rows_of(risk, params, batch)
        product = tree.map(lambda leaf: leaf * rows.to(leaf), hvp_on(risk, params, batch, vector))
        return {"sum": tree.add(carry["sum"], product), "rows": carry["rows"] + rows}

    total = scan(step, {"sum": tree.zeros(params), "rows": no_rows(params)}, data)
    return tree.map(lambda leaf: leaf / total["rows"].to(leaf), total["sum"])


def conjugate_gradient(product: Callable[[Any], Any], b: Any, steps: int) -> Any:
    """Solve ``product(x)`` = ``b`` in ``steps`` steps from zero; ``product`` is a symmetric positive linear map of trees.

    Once the system is solved x stays, so that more steps than needed do no harm.
    """
    x, residual = tree.zeros(b), b
    direction, norm2 = b, tree.dot(b, b)
    for _ in range(steps):
        image = product(direction)
        curvature = tree.dot(direction, image)
        unsolved = (curvature > 0) & (norm2 > 0)
        step_size = torch.where(unsolved, norm2 / torch.where(unsolved, curvature, 1.0), 0.0)
        x, residual = tree.add(x, direction, step_size), tree.add(residual, image, -step_size)
        new_norm2 = tree.dot(residual, residual)
        direction = tree.add(residual, direction, torch.where(unsolved, new_norm2 / torch.where(unsolved, norm2, 1.0), 0.0))
        norm2 = new_norm2
    return x
