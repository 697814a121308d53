"""Mean-regularised multi-task learning: Evgeniou and Pontil (2004), the mean-regularised case of MOCHA.

Objective sum_i f_i(w_i) + lam/2 sum_i |w_i - wbar|^2, hence the client gradient g + lam (w_i - wbar). The
fact sheet prints the penalty as l1 |.|^2, so lam here is 2 l1; its ridge l2 |W|^2 is left out. The centre
wbar is the vector received and stays put during the round; w_i is kept, and it is also what is sent. From
memory: the cited papers solve the joint problem; the round-by-round form is the fact sheet's.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import Case


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, lam):
    shared = np.array(start, dtype=float)
    own = [None] * len(clients)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean = np.zeros_like(shared)
        for i in cohort:
            X, y = clients[i]
            w = shared.copy() if own[i] is None else own[i]
            for idx in batches(t, i, "train"):
                w = w - lr * (grad(w, X[idx], y[idx]) + lam * (w - shared))
            own[i] = w
            mean = mean + weights[i] / mass * w
        shared = mean
        history.append({"shared": shared.copy(), "personal": [(shared if w is None else w).copy() for w in own]})
    return history


TOLD = {"lr": 0.2, "lam": 0.7}
CASES = (Case(ft.MTL(**TOLD, steps=3), TOLD),)
