"""kNN-Per: Marfoq et al. (2022), the prediction rule; the model under it is plain FedAvg.

Keys are the client's training features, values their true labels. For a query the k nearest keys vote with
exp(-d / (D scale)), d the squared Euclidean distance and D the number of features; the votes are normalised and
mixed, as probabilities, with the model's: weight * p_knn + (1 - weight) * p_global.
Equal distances go to the lower index; a client with fewer than k samples uses all of them.
"""

import sys

import numpy as np
import pytest

import fedtailor as ft
from tests.oracles.harness import BIASES, ENGINES, WEIGHTS, Case, D, K, Setting, Trial, close, flat, play_rounds


def predict(features_train, y_train, features_test, global_probabilities, k, weight, classes, scale=1.0):
    keys = np.asarray(features_train, dtype=float)
    D = keys.shape[1]
    mixed = np.zeros((len(features_test), classes))
    for r, query in enumerate(np.asarray(features_test, dtype=float)):
        d = ((keys - query) ** 2).sum(axis=1)
        near = np.argsort(d, kind="stable")[:k]
        vote = np.exp(-(d[near] - d[near[0]]) / (D * scale))  # the common factor cancels below and saves the far queries
        p_knn = np.zeros(classes)
        for j, v in zip(near, vote, strict=True):
            p_knn[y_train[j]] += v
        mixed[r] = weight * p_knn / vote.sum() + (1.0 - weight) * np.asarray(global_probabilities[r], dtype=float)
    return mixed


@pytest.mark.parametrize("engine", ENGINES)
def test_knn_per_mixes_as_the_paper_says(engine):
    method = ft.KNNPer(lr=0.2, steps=3, k=4, weight=0.3, scale=0.5)
    trial = Trial(sys.modules[__name__], Case(method, rounds=3), Setting(None, 4))
    for seen in play_rounds(trial, engine):
        w = flat(seen.shared["model"])
        for part in seen.engine.predictions(seen.shared, np.arange(4), seen.store, trial.plan.federation.test):
            for i, logits, mask in zip(part.ids, part.personal, part.mask, strict=True):
                X, y = trial.clients[i]
                z = np.exp(X @ w[WEIGHTS].reshape(K, D).T + w[BIASES])
                expected = predict(X, y, X, z / z.sum(1, keepdims=True), 4, 0.3, K, 0.5)  # features of a linear model: its input
                close(logits[mask].exp().numpy(), expected, trial, f"client {i}", seen)
