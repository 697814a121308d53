"""Small generated data that the examples share."""

import numpy as np


def rows(count, shift, seed):
    """Two classes in four numbers; ``shift`` turns the border between them, so that clients differ."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 4)).astype(np.float32)
    y = (x[:, 0] + shift * x[:, 1] + 0.3 * draw.normal(size=count) > 0).astype(int)
    return x, y


def clients(number=6, count=40, seed=0):
    """One pair (x, y) per client."""
    return [rows(count, 2 * i / number - 1, seed + i) for i in range(number)]
