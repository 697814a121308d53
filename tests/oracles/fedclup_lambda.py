"""FedCLUP with a personalisation degree per client: CLUP, equation (19), which the paper leaves open.

Problem sum_i p_i (L_i(w_i) + lams[i]/2 |g - w_i|^2). As in FedCLUP, with lams[i] in the client's step and in its
upload lams[i] (g - w_i), so a client with a larger lambda also pulls g harder; the server's step on the mean
upload is unchanged. With equal lams this is FedCLUP.
"""

import numpy as np


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, server_lr, lams):
    g = np.array(start, dtype=float)
    own = [None] * len(clients)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean_upload = np.zeros_like(g)
        for i in cohort:
            X, y = clients[i]
            w = g.copy() if own[i] is None else own[i]
            for idx in batches(t, i, "train"):
                w = w - lr * (grad(w, X[idx], y[idx]) + lams[i] * (w - g))
            own[i] = w
            mean_upload = mean_upload + weights[i] / mass * lams[i] * (g - w)
        g = g - server_lr * mean_upload
        history.append({"shared": g.copy(), "personal": [(g if w is None else w).copy() for w in own]})
    return history
