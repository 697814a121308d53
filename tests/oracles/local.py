"""PureLocalTraining: each client fits its own risk and nothing is ever sent.

MINIMAX, problem (3); LocalTrain in CLUP. A client moves only in the rounds whose cohort contains it.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import linear_cases


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr):
    own = [np.array(start, dtype=float) for _ in clients]
    history = []
    for t in range(rounds):
        for i in cohorts(t):
            X, y = clients[i]
            for idx in batches(t, i, "train"):
                own[i] = own[i] - lr * grad(own[i], X[idx], y[idx])
        history.append({"shared": None, "personal": [w.copy() for w in own]})
    return history


TOLD = {"lr": 0.15}
CASES = linear_cases(ft.Local(**TOLD), TOLD)
