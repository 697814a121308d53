"""L2GD: Hanzely and Richtarik (2020), loopless local gradient descent (from memory, through the fact sheet).

Problem (1/n) sum_i f_i(x_i) + lam/(2n) sum_i |x_i - xbar|^2. One coin for all: with probability 1 - p everybody
takes a local step lr/(n (1-p)), with probability p everybody moves the share t = lr lam/(n p) of the way to the
mean. Either step divided by its probability is unbiased for lr times the whole gradient. With a fixed lr the
iterates only reach a neighbourhood, unless the clients agree on the minimiser. Everyone takes part, equally
weighted: `cohorts` and `weights` are ignored. A mean has to be sent only when the coin turns from False to True.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import Case, Setting


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, lam, p, coins):
    n = len(clients)
    x = [np.array(start, dtype=float) for _ in clients]
    history = []
    for k in range(rounds):
        if coins(k):
            t = lr * lam / (n * p)
            xbar = sum(x) / n
            x = [(1.0 - t) * v + t * xbar for v in x]
        else:
            moved = []
            for i, (X, y) in enumerate(clients):
                idx = batches(k, i, "train")[0]
                moved.append(x[i] - lr / (n * (1.0 - p)) * grad(x[i], X[idx], y[idx]))
            x = moved
        history.append({"shared": sum(x) / n, "personal": [v.copy() for v in x]})
    return history


def told(trial):
    """Their alpha is n times our lr; the coins are the package's."""
    coins = [trial.round(t).uniform("L2GD", t) < 0.4 for t in range(trial.case.rounds)]
    assert len(set(coins)) == 2  # both branches are walked
    return {"lr": len(trial.clients) * 0.3, "lam": 0.6, "p": 0.4, "coins": coins.__getitem__}


CASES = (Case(ft.L2GD(lr=0.3, lam=0.6, p=0.4), told, settings=(Setting(None, 4), Setting(4, 4))),)
