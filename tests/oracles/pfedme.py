"""pFedMe: T. Dinh et al. (2020), Algorithm 1.

Round: w_i starts at the shared w. In each outer step a batch is drawn, theta approximates the minimiser of
L(theta; batch) + lam/2 |theta - w_i|^2 by `inner_steps` gradient steps, and w_i follows the envelope's
gradient lam (w_i - theta). The server mixes with beta. The paper leaves open where the inner solver starts;
here it is the last theta, also across rounds, so theta_i is kept while w_i is not.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import linear_cases


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, inner_lr, inner_steps, lam, beta):
    shared = np.array(start, dtype=float)
    thetas = [None] * len(clients)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean = np.zeros_like(shared)
        for i in cohort:
            X, y = clients[i]
            w = shared.copy()
            theta = shared.copy() if thetas[i] is None else thetas[i]
            for idx in batches(t, i, "train"):
                for _ in range(inner_steps):
                    theta = theta - inner_lr * (grad(theta, X[idx], y[idx]) + lam * (theta - w))
                w = w - lr * lam * (w - theta)
            thetas[i] = theta
            mean = mean + weights[i] / mass * w
        shared = (1.0 - beta) * shared + beta * mean
        personal = [(shared if theta is None else theta).copy() for theta in thetas]
        history.append({"shared": shared.copy(), "personal": personal})
    return history


TOLD = {"lr": 0.15, "inner_lr": 0.08, "inner_steps": 3, "lam": 1.5, "beta": 0.9}
CASES = linear_cases(ft.PFedMe(**TOLD), TOLD)
