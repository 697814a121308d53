"""Guard: which uploads the server takes. What is refused is named, and changes nothing but the log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedtailor import tree

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
ENOUGH = 3  # norms from which their median says something


def fault(upload: Any, like: Shapes) -> str | None:
    """Return what is wrong with an upload that should have these names, shapes and types and be finite; None: nothing."""
    have = tree.shapes(upload)
    for path in (*like, *have):
        if path not in have:
            return f"{path!r} is missing"
        if path not in like:
            return f"{path!r} was not asked for"
        (shape, dtype), (wanted, kind) = have[path], like[path]
        if shape != wanted:
            return f"{path!r} has shape {shape}, not {wanted}"
        if dtype != kind:
            return f"{path!r} is of type {_word(dtype)}, not {_word(kind)}"
    for path, leaf in tree.items(upload):
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            return f"{path!r} is not finite"
    return None


def norm(upload: Any) -> float:
    """Return the Euclidean norm over all floating leaves."""
    parts = [float(leaf.double().norm()) for leaf in tree.leaves(upload) if leaf.is_floating_point()]
    return math.hypot(*parts) if parts else 0.0


def absurd(norms: Sequence[float], before: Sequence[float], factor: float) -> list[bool]:
    """Say of each norm whether it is more than ``factor`` times the median of all of them and of those accepted ``before``.

    With fewer than three norms to compare, or a median of zero, nothing is absurd.
    """
    known = [*norms, *before]
    middle = float(np.median(known)) if len(known) >= ENOUGH else 0.0
    return [bool(middle > 0 and value > factor * middle) for value in norms]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
