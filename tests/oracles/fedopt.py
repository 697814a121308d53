"""FedOpt: Reddi et al. (2021), Algorithm 2 (FedAdam, FedYogi); FedAvgM: Hsu et al. (2019).

Clients run plain SGD from w; the weighted mean displacement delta serves the server's optimiser as an ascent
direction. "avgm": heavy-ball momentum without damping. "adam" and "yogi": damped first moment m, second moment v,
step m / (sqrt(v) + tau) with tau outside the root and no bias correction.

From the project's brief and memory, not from the papers' text: the three rules, m = 0 and v = tau^2 at the start
(the paper asks for v of at least tau^2), and that momentum is undamped for "avgm" only. With sign(0) = 0, Yogi's v
stands still where it equals delta^2.
"""

import numpy as np


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, server_lr, rule, beta1, beta2, tau):
    assert rule in ("avgm", "adam", "yogi")
    w = np.array(start, dtype=float)
    m = np.zeros_like(w)
    v = np.full_like(w, tau**2)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        delta = np.zeros_like(w)
        for i in cohort:
            X, targets = clients[i]
            y = w.copy()
            for idx in batches(t, i, "train"):
                y = y - lr * grad(y, X[idx], targets[idx])
            delta = delta + weights[i] / mass * (y - w)
        if rule == "avgm":
            m = beta1 * m + delta
            w = w + server_lr * m
        else:
            m = beta1 * m + (1.0 - beta1) * delta
            if rule == "adam":
                v = beta2 * v + (1.0 - beta2) * delta**2
            else:
                v = v - (1.0 - beta2) * delta**2 * np.sign(v - delta**2)
            w = w + server_lr * m / (np.sqrt(v) + tau)
        history.append({"shared": w.copy(), "personal": [w.copy() for _ in clients]})
    return history
