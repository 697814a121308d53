"""Softmax fits with Jeffreys' penalty (Firth's correction) or a ridge, to several sets of labels at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

Numbers = NDArray[np.float64]


class _State(NamedTuple):
    value: Numbers  # [B]
    step: Numbers  # [B, outputs - 1, r]
    gain: Numbers  # [B]: what the step should gain
    spread: Numbers  # [B, p, p]


def maximize(
    Z: Numbers, Y: Numbers, contrasts: Numbers, start: Numbers, lam: float, gain: float = 1e-10
) -> tuple[Numbers, Numbers]:
    """Return fits to several sets of labels [B, n, outputs] at once, by Newton's method with step halving, and their covariances.

    It ends where a step promises less than ``gain``, in squared standard errors. Without a ridge the likelihood has Jeffreys'
    penalty, half the log-determinant of the information.
    """
    current = np.array(start)
    state = _state(Z, Y, contrasts, current, lam)
    length = np.ones(len(current))
    for _ in range(100):
        active = (state.gain > gain) & (length > 1e-6)
        if not active.any():
            break
        proposal = current[active] + length[active, None, None] * state.step[active]
        trial = _state(Z, Y[active], contrasts, proposal, lam)
        better = trial.value >= state.value[active] - 1e-10
        accepted = np.flatnonzero(active)[better]
        current[accepted] = proposal[better]
        for old, new in zip(state, trial, strict=True):
            old[accepted] = new[better]
        length[active] = np.where(better, np.minimum(1.0, 2 * length[active]), length[active] / 2)
    return current, state.spread


def _state(Z: Numbers, Y: Numbers, contrasts: Numbers, parameters: Numbers, lam: float) -> _State:
    B, free, r = parameters.shape
    logs = log_softmax(Z @ parameters.transpose(0, 2, 1) @ contrasts.T, axis=2)  # [B, n, outputs]
    p = np.exp(logs)
    reduced = p @ contrasts  # [B, n, free]
    blocks = np.empty((B, free, r, free, r))
    for a in range(free):
        for b in range(a, free):
            weight = p @ (contrasts[:, a] * contrasts[:, b]) - reduced[..., a] * reduced[..., b]
            blocks[:, a, :, b] = blocks[:, b, :, a] = Z.T @ (weight[..., None] * Z)
    information = blocks.reshape(B, free * r, free * r)
    scale = np.trace(information, axis1=1, axis2=2) / (free * r)
    # saturated probabilities leave a direction with no information at all in floating point
    regularized = information + (lam + 1e-10 * scale + 1e-12)[:, None, None] * np.eye(free * r)
    inverse = np.linalg.inv(regularized)
    value = (Y * logs).sum((1, 2))
    residual = Y - p
    if lam:
        value = value - lam / 2 * (parameters**2).sum((1, 2))
        spread = inverse @ information @ inverse
    else:
        value = value + np.linalg.slogdet(regularized)[1] / 2
        residual = residual + _bias_term(Z, p, inverse.reshape(B, free, r, free, r), contrasts) / 2
        spread = inverse
    slope = (contrasts.T @ (residual.transpose(0, 2, 1) @ Z) - lam * parameters).reshape(B, -1, 1)
    step = inverse @ slope
    return _State(value, step.reshape(parameters.shape), (slope * step).sum((1, 2)), spread)


def _bias_term(Z: Numbers, p: Numbers, inverse: Numbers, contrasts: Numbers) -> Numbers:
    """Return the derivative in the logits of the log-determinant of the information: third cumulants of a draw from p against the
    covariances H of each row's logits, p_k (H_kk - sum_a p_a H_aa - 2 sum_a p_a H_ka + 2 p'Hp)."""
    free = inverse.shape[1]
    inner = np.empty((*p.shape[:2], free, free))
    for a in range(free):
        for b in range(a, free):
            inner[..., a, b] = inner[..., b, a] = ((Z @ inverse[:, a, :, b]) * Z).sum(2)
    H = contrasts @ inner @ contrasts.T  # [B, n, outputs, outputs]
    diagonal = np.einsum("bnkk->bnk", H)
    across = (H @ p[..., None])[..., 0]
    mean = (p * diagonal).sum(2, keepdims=True)
    return p * (diagonal - mean - 2 * across + 2 * (p * across).sum(2, keepdims=True))
