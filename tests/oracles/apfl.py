"""APFL: Deng, Kamani and Mahdavi (2020), Algorithm 1, with the optional adaptive alpha.

A step uses one batch and three quantities of before the step, w, v and alpha: the shared copy follows the
gradient at w, the personal v the gradient at vbar = alpha v + (1 - alpha) w, times alpha by the chain rule,
and alpha its own derivative <v - w, gradient at vbar>, clipped to [0, 1]. (The authors' code moves alpha once
a round and adds 0.02 alpha to that derivative; the paper does neither.) v_i and alpha_i are kept, w_i is sent.
A client predicts with its mixture taken against the newest shared model.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import Case


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, alpha, adaptive, alpha_lr):
    shared = np.array(start, dtype=float)
    own = [None] * len(clients)
    mix = [float(alpha)] * len(clients)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean = np.zeros_like(shared)
        for i in cohort:
            X, y = clients[i]
            w = shared.copy()
            v = shared.copy() if own[i] is None else own[i]
            a = mix[i]
            for idx in batches(t, i, "train"):
                at_w = grad(w, X[idx], y[idx])
                at_vbar = grad(a * v + (1.0 - a) * w, X[idx], y[idx])
                slope = np.dot(v - w, at_vbar)  # d f(vbar) / d alpha
                w, v = w - lr * at_w, v - lr * a * at_vbar
                if adaptive:
                    a = min(1.0, max(0.0, a - alpha_lr * slope))
            own[i], mix[i] = v, a
            mean = mean + weights[i] / mass * w
        shared = mean
        personal = []
        for v, a in zip(own, mix, strict=True):
            personal.append(shared.copy() if v is None else a * v + (1.0 - a) * shared)
        history.append({"shared": shared.copy(), "personal": personal})
    return history


FIXED = {"lr": 0.2, "alpha": 0.4, "adaptive": False}
ADAPTIVE = {"lr": 0.2, "alpha": 0.4, "adaptive": True, "alpha_lr": 0.5}
CASES = (
    Case(ft.APFL(**FIXED, steps=3), {**FIXED, "alpha_lr": 0.0}),
    Case(ft.APFL(**ADAPTIVE, steps=3), ADAPTIVE, "adaptive"),
)
