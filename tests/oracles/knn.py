"""kNN-Per: Marfoq et al. (2022), the prediction rule; the model under it is plain FedAvg.

Keys are the client's training features, values their true labels. For a query the k nearest keys vote with
exp(-d / (D scale)), d the squared Euclidean distance and D the number of features; the votes are normalised and
mixed, as probabilities, with the model's: weight * p_knn + (1 - weight) * p_global.
Equal distances go to the lower index; a client with fewer than k samples uses all of them.
"""

import numpy as np


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
