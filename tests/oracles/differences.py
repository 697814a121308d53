"""Descent by differences, for transcriptions that are themselves to be checked: nothing is differentiated by hand or by torch."""

import numpy as np

from tests.oracles.harness import D, K


def rows(seed=0, n=11):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(n, D)), draw.integers(0, K, n)


def relu(z):
    return np.maximum(z, 0)


def soft(z):
    q = np.exp(z - z.max(1, keepdims=True))
    return q / q.sum(1, keepdims=True)


def risk(out, y):
    """Mean cross-entropy."""
    return -np.log(soft(out)[np.arange(len(y)), y]).mean()


def slope(function, point, h):
    """Central differences of ``function`` at ``point`` in every entry: a tree like it."""
    point = arrays(point)
    found = arrays(point)
    for a, b in zip(leaves(point), leaves(found), strict=True):
        for at in np.ndindex(a.shape):
            here = a[at]
            a[at] = here + h
            above = function(point)
            a[at] = here - h
            b[at] = (above - function(point)) / (2 * h)
            a[at] = here
    return found


def moved(point, lr, function, h=1e-6):
    """A step of descent by central differences."""
    new = arrays(point)
    for a, b in zip(leaves(new), leaves(slope(function, point, h)), strict=True):
        a -= lr * b
    return new


def arrays(tree):
    """A copy of a tree of arrays or tensors, as arrays."""
    if isinstance(tree, dict):
        return {name: arrays(part) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(arrays(part) for part in tree)
    return np.asarray(tree, dtype=float).copy()


def leaves(tree):
    if isinstance(tree, np.ndarray):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]
