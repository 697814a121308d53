"""FedCLUP with a growing lam: CLUP, Figure 3 (right) and the paragraph "Potential Solution in Practice".

The round is FedCLUP's (Algorithm 1) with the lam of the moment and server_lr = 1/lam, so that the server averages the
w_i. After its steps a client measures w_i on its validation rows; the cohort's weighted mean of these risks is what has
to fall. The paper raises lam "gradually" once validation plateaus and gives no numbers; by the method's description a
round counts as a fall when the mean is below the mark by more than the share `tolerance` of it and then sets the mark,
`patience` rounds with no fall multiply lam by `factor`, at most to `ceiling`. The paper and the description are silent on
what comes next; here, as in the package, the count begins again and the mark is the risk of that round.
"""

from dataclasses import replace

import numpy as np
import pytest

import fedtailor as ft
from tests.oracles import harness
from tests.oracles.harness import BIASED, STEPS_AND_EPOCHS, Case, D, K
from tests.oracles.risks import cross_entropy


def run(
    grad, clients, start, *, rounds, batches, cohorts, weights, lr, lam, factor, patience, ceiling, tolerance, risk, validation
):  # fmt: skip
    g = np.array(start, dtype=float)
    own = [None] * len(clients)
    mark, waited = np.inf, 0
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        mass = sum(weights[i] for i in cohort)
        mean_upload, measured = np.zeros_like(g), 0.0
        for i in cohort:
            X, y = clients[i]
            w = g.copy() if own[i] is None else own[i]
            for idx in batches(t, i, "train"):
                w = w - lr * (grad(w, X[idx], y[idx]) + lam * (w - g))
            own[i] = w
            mean_upload = mean_upload + weights[i] / mass * lam * (g - w)
            measured += weights[i] / mass * risk(w, *validation[i])
        g = g - 1.0 / lam * mean_upload
        fell = measured < mark * (1.0 - tolerance)
        waited = 0 if fell else waited + 1
        stalled = waited == patience
        if stalled:
            lam, waited = min(lam * factor, ceiling), 0
        if fell or stalled:
            mark = measured
        personal = [(g if w is None else w).copy() for w in own]
        history.append({"shared": g.copy(), "personal": personal, "lam": lam, "mark": mark, "fell": fell})
    return history


def rows_for_validation():
    draw = np.random.default_rng(11)
    return [(draw.normal(size=(n, D)) + 0.4 * i, draw.integers(0, K, n)) for i, n in enumerate((6, 3, 8, 5))]


# lam rises to the ceiling in ten rounds, and validation falls again after a rise
RISING = {"lr": 0.5, "lam": 0.05, "factor": 3.0, "patience": 2, "ceiling": 0.4, "tolerance": 0.01}
CASES = (
    Case(
        ft.FedCLUPDynamic(**RISING),
        {**RISING, "risk": cross_entropy, "validation": rows_for_validation()},
        settings=STEPS_AND_EPOCHS,
        problem=replace(BIASED, val=rows_for_validation),
        rounds=10,
    ),
)


def agree(trial, seen, entry):
    harness.agree(trial, seen, entry)
    assert float(seen.shared["lam"]) == pytest.approx(entry["lam"], rel=1e-12), f"lam: {seen.where}"
    assert float(seen.server["best"]) == pytest.approx(entry["mark"], abs=trial.case.tolerance), f"mark: {seen.where}"


def afterwards(trial, history):
    harness.learned(trial, history)
    lams = [entry["lam"] for entry in history]
    assert RISING["lam"] == lams[0] < RISING["lam"] * RISING["factor"] in lams
    assert lams[-1] == RISING["ceiling"] < RISING["lam"] * RISING["factor"] ** 2
    assert any(entry["fell"] for entry in history[lams.index(RISING["lam"] * RISING["factor"]) :])  # after a rise
