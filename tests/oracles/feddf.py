"""FedDF: Lin et al. (2020), the server's distillation, for a linear softmax model without bias.

The student descends mean_r KL(softmax(m_r / T) || softmax(s_r / T)), m the plain mean of the teachers' logits and
s the student's, on all rows of x in each step. Differentiated by hand: d/ds_r = (q_r - target_r) / (T n), no
factor T^2. `logits(w, x)` gives the (n, K) logits; None means `linear`, the only model the gradient is right for.
The paper uses Adam (from memory: with the moments of Kingma and Ba), batches and a cosine schedule: not here.
"""

import numpy as np


def linear(w, x):
    """Logits x W^T, where w holds the (K, d) matrix W row by row."""
    return x @ w.reshape(-1, x.shape[1]).T


def distil(student, teachers, logits, x, steps, lr, temperature=1.0):
    logits = logits or linear
    w = np.array(student, dtype=float)
    target = _target(teachers, logits, x, temperature)
    for _ in range(steps):
        w = w - lr * _gradient(w, target, logits, x, temperature)
    return w


def adam(student, teachers, logits, x, steps, lr, temperature=1.0, beta1=0.9, beta2=0.999, eps=1e-8):
    logits = logits or linear
    w = np.array(student, dtype=float)
    target = _target(teachers, logits, x, temperature)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for s in range(1, steps + 1):
        g = _gradient(w, target, logits, x, temperature)
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g**2
        w = w - lr * (m / (1.0 - beta1**s)) / (np.sqrt(v / (1.0 - beta2**s)) + eps)
    return w


def _target(teachers, logits, x, T):
    return _softmax(sum(logits(np.asarray(w, dtype=float), x) for w in teachers) / len(teachers) / T)


def _gradient(w, target, logits, x, T):
    off = (_softmax(logits(w, x) / T) - target) / (T * len(x))
    return (off.T @ x).ravel()


def _softmax(z):
    q = np.exp(z - z.max(axis=1, keepdims=True))
    return q / q.sum(axis=1, keepdims=True)
