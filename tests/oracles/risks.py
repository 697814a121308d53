"""Gradients of two empirical risks, differentiated by hand, in float64."""

import numpy as np


def least_squares(w, X, y):
    """Gradient of |Xw - y|^2 / (2n)."""
    return X.T @ (X @ w - y) / len(y)


def softmax(w, X, y):
    """Gradient of the mean cross-entropy of logits X W^T, where w holds the (K, d) matrix W row by row."""
    n, d = X.shape
    logits = X @ w.reshape(-1, d).T
    logits = logits - logits.max(axis=1, keepdims=True)  # the same shift for all classes leaves q unchanged
    q = np.exp(logits)
    q = q / q.sum(axis=1, keepdims=True)
    q[np.arange(n), y] -= 1.0  # d loss_j / d logits_j = q_j - onehot(y_j)
    return (q.T @ X / n).ravel()


def softmax_with_bias(w, X, y):
    """Gradient of ``cross_entropy`` below."""
    q = np.exp(_shifted(w, X))
    q = q / q.sum(axis=1, keepdims=True)
    q[np.arange(len(y)), y] -= 1.0
    return np.concatenate([(q.T @ X / len(y)).ravel(), q.mean(axis=0)])


def cross_entropy(w, X, y):
    """Mean cross-entropy of logits X W^T + b, where w holds the (K, d) matrix W row by row and then b."""
    z = _shifted(w, X)
    return float(np.mean(np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(y)), y]))


def _shifted(w, X):
    d = X.shape[1]
    k = len(w) // (d + 1)
    z = X @ w[: k * d].reshape(k, d).T + w[k * d :]
    return z - z.max(axis=1, keepdims=True)
