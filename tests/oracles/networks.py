"""Affine maps, ReLUs and batch norms, forward and backward by hand, in float64.

A model is a dict of arrays under torch's names, running statistics behind "buffer:". Its layers are affine maps and
batch norms in the order of the names, with a ReLU before every affine map but the first; the risk is the mean
cross-entropy. Batch norm as in torch: it normalises with the biased variance of the batch and moves the running
variance by the unbiased one. Torch refuses to train on one row; here, as in the package, such a row is normalised
with the running statistics, which it leaves alone.
"""

import numpy as np
from torch import nn

MOMENTUM, EPS = 0.1, 1e-5


def normed(inputs, outputs):
    """Torch's module for two batch norms, their affine parameters away from one and zero."""
    net = nn.Sequential(
        nn.Linear(inputs, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, outputs)
    )
    for norm in (net[1], net[4]):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    return net


def owner(name):
    """The path of the layer that a parameter or statistic stands in."""
    return name.removeprefix("buffer:").rpartition(".")[0]


def paths(model):
    return list(dict.fromkeys(owner(name) for name in model))


def is_norm(model, path):
    return f"buffer:{path}.running_mean" in model


def predict(model, X):
    """Logits with the running statistics."""
    return _forward(model, X, training=False)[0]


def risk(model, X, y):
    """Mean cross-entropy of the training pass."""
    logits = _forward(model, X, training=True)[0]
    shifted = logits - logits.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y]))


def gradient(model, X, y):
    """Of ``risk``, by parameter; and the running statistics after the pass, on which the risk does not depend."""
    logits, tape, statistics = _forward(model, X, training=True)
    d = np.exp(logits - logits.max(1, keepdims=True))
    d /= d.sum(1, keepdims=True)
    d[np.arange(len(y)), y] -= 1.0
    d /= len(y)
    found = {}
    for k, (path, seen, scale) in reversed(list(enumerate(tape))):
        weight, bias = _names(path)
        found[bias] = d.sum(0)
        if is_norm(model, path):
            found[weight] = (d * seen).sum(0)
            d = d * model[weight]
            if len(X) > 1:  # mean and deviation depend on the batch: what moves along with them is taken out
                d = d - d.mean(0) - seen * (d * seen).mean(0)
            d = d * scale
        else:
            found[weight] = d.T @ seen
            d = d @ model[weight]
            if k:
                d = d * (seen > 0)
    return found, statistics


def _forward(model, X, training):
    """Logits; per layer (path, what its weight multiplied, one over the deviation); statistics after the pass."""
    h, tape = np.asarray(X, dtype=float), []
    statistics = {name: value for name, value in model.items() if name.startswith("buffer:")}
    for k, path in enumerate(paths(model)):
        weight, bias = (model[name] for name in _names(path))
        scale = None
        if is_norm(model, path):
            mean, variance = (model[f"buffer:{path}.running_{what}"] for what in ("mean", "var"))
            if training and len(h) > 1:
                old_mean, old_variance = mean, variance
                mean, variance = h.mean(0), h.var(0)
                unbiased = variance * len(h) / (len(h) - 1)
                statistics[f"buffer:{path}.running_mean"] = (1.0 - MOMENTUM) * old_mean + MOMENTUM * mean
                statistics[f"buffer:{path}.running_var"] = (1.0 - MOMENTUM) * old_variance + MOMENTUM * unbiased
            scale = 1.0 / np.sqrt(variance + EPS)
            seen = (h - mean) * scale
            h = seen * weight + bias
        else:
            seen = np.maximum(h, 0.0) if k else h
            h = seen @ weight.T + bias
        tape.append((path, seen, scale))
    return h, tape, statistics


def _names(path):
    return (f"{path}.weight", f"{path}.bias") if path else ("weight", "bias")
