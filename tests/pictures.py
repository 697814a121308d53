"""Small federations of pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedtailor import Federation


def pictures(
    sizes: Sequence[int] = (6, 9, 4), shape: Sequence[int] = (3, 8, 8), classes: int = 3, seed: int = 0, public: int = 0
) -> Federation:
    """Noise with a brighter stripe whose place is the class."""
    draw = np.random.default_rng(seed)

    def rows(n: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = draw.normal(size=(n, *shape)) * 0.3, np.arange(n) % classes
        for i, label in enumerate(y):
            x[i, ..., label, :] += 1.0
        return x, y

    train, test = ([rows(n if what == "train" else 5) for n in sizes] for what in ("train", "test"))
    unlabelled = draw.normal(size=(public, *shape)) if public else None
    return Federation.from_arrays(train, test, public=unlabelled, task="classification", name="pictures")
