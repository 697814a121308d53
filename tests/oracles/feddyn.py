"""FedDyn: Acar et al. (2021), Algorithm 1, its local minimisation replaced by plain SGD steps.

Client: from theta = w, steps on L_i(theta) - <lam_i, theta> + alpha/2 |theta - w|^2; then lam_i falls by
alpha (theta - w), so that after an exact solve it is the gradient of L_i at theta. Server: h falls by alpha times
the cohort's summed displacement over the number of all clients, and w is the plain mean of the cohort's theta
less h / alpha, with the new h. `weights` are not used. Reported is w, from which clients start, and not the mean
of theta that the authors' code evaluates.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import PLAIN_MEAN, Case


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, alpha):
    w = np.array(start, dtype=float)
    h = np.zeros_like(w)
    lams = [np.zeros_like(w) for _ in clients]
    history = []
    for t in range(rounds):
        thetas = []
        for i in cohorts(t):
            X, y = clients[i]
            theta = w.copy()
            for idx in batches(t, i, "train"):
                theta = theta - lr * (grad(theta, X[idx], y[idx]) - lams[i] + alpha * (theta - w))
            lams[i] = lams[i] - alpha * (theta - w)
            thetas.append(theta)
        h = h - alpha / len(clients) * np.sum([theta - w for theta in thetas], axis=0)
        w = np.mean(thetas, axis=0) - h / alpha
        history.append({"shared": w.copy(), "personal": [w.copy() for _ in clients]})
    return history


TOLD = {"lr": 0.2, "alpha": 0.4}
CASES = (Case(ft.FedDyn(**TOLD, steps=3), TOLD, settings=PLAIN_MEAN),)
