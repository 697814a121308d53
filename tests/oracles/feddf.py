"""FedDF: Lin et al. (2020), the server's distillation, for a linear softmax model without bias.

The student descends mean_r KL(softmax(m_r / T) || softmax(s_r / T)), m the plain mean of the teachers' logits and
s the student's, on all rows of x in each step. Differentiated by hand: d/ds_r = (q_r - target_r) / (T n), no
factor T^2. `logits(w, x)` gives the (n, K) logits; None means `linear`, the only model the gradient is right for.
The paper uses Adam (from memory: with the moments of Kingma and Ba), batches and a cosine schedule: not here.
"""

import sys
from dataclasses import replace

import numpy as np
import torch

import fedtailor as ft
from tests.oracles.harness import SOFTMAX, Case, D, K, Setting, Trial, gap


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


def test_feddf_distils_as_the_paper_says():
    draw = np.random.default_rng(1)
    public = draw.normal(size=(20, D))
    method = ft.FedDF(kd_steps=7, kd_lr=0.05, kd_batch=20, temperature=2.0)
    trial = Trial(sys.modules[__name__], Case(method, problem=replace(SOFTMAX, public=lambda: public)), Setting(None, 3))
    task, rnd = trial.plan.task, trial.round(0)
    teachers = [draw.normal(size=K * D) for _ in range(3)]
    student = draw.normal(size=K * D)  # not the mean: for a linear model that is the answer already
    stacked = {"model": {"weight": torch.from_numpy(np.stack(teachers)).view(3, K, D)}}
    reduce = method.reducer(task, {}, rnd)
    upload = reduce.finish(reduce.add(reduce.start(), stacked, torch.ones(3), torch.arange(3)))
    upload["model"] = {"weight": torch.from_numpy(student.copy()).view(K, D)}
    ours = method.server_update(task, {}, {}, upload, rnd)[0]["model"]["weight"].numpy().ravel()
    assert gap(ours, adam(student, teachers, None, public, 7, 0.05, 2.0)) <= 1e-9
    assert gap(ours, student) > 1e-3
