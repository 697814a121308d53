"""FedBABU: Oh et al. (2022), Algorithm 1 and its evaluation by full fine-tuning.

The head (`personal_at`) stays at its first value, the same for everyone, in all rounds; clients step on the body
(`shared_at`) only and the server takes its weighted mean (the published code: plain). For its predictions every
client, sampled or not, takes plain SGD steps on all coordinates from the newest body and the first head (phase
"personalize"); that copy is dropped before the next round.
"""

import numpy as np

import fedtailor as ft
from tests.oracles.harness import SPLIT, Case


def run(grad, clients, start, *, rounds, batches, cohorts, weights, shared_at, personal_at, lr):
    model = np.array(start, dtype=float)  # its personal_at coordinates are never written
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean = np.zeros(len(shared_at))
        for i in cohort:
            X, y = clients[i]
            w = model.copy()
            for idx in batches(t, i, "train"):
                w[shared_at] = w[shared_at] - lr * grad(w, X[idx], y[idx])[shared_at]
            mean = mean + weights[i] / mass * w[shared_at]
        model[shared_at] = mean
        tuned = []
        for i, (X, y) in enumerate(clients):
            w = model.copy()
            for idx in batches(t, i, "personalize"):
                w = w - lr * grad(w, X[idx], y[idx])
            tuned.append(w)
        history.append({"shared": mean.copy(), "personal": tuned})
    return history


CASES = (Case(ft.FedBABU(lr=0.2, personal="bias", steps=3, finetune_steps=4), {"lr": 0.2, **SPLIT}),)
