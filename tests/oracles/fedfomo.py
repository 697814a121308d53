"""FedFomo: Zhang et al. (2021), Section 3, equations (2)-(4), and the sampling of models by the affinities P.

The server holds every client's last uploaded model; all begin at the start. A sampled client i receives models theta_n of other
clients and weighs each by what it does on its own validation rows, against its own last model theta_i:
    w_n = (L_i(theta_i) - L_i(theta_n)) / |theta_n - theta_i|,
takes the positive parts, normalised to sum to one unless all are zero, and goes to theta_i + sum_n w_n (theta_n - theta_i)
(equation (4)). A model that equals its own (|theta_n - theta_i| = 0) has weight zero. From there it takes its local steps on
training rows; the result is its model, is uploaded, and is what it predicts with. L_i is the mean validation risk.

Whose models: ``downloads(t, i, p)``, p being row i of the affinities P, to which the server adds the w_n of before the clipping
after each visit. All others' by default. ``sampled`` is the paper's: the ``count`` highest, or with probability epsilon any.
The released code measures the own model's loss too and lets it compete (its weight is zero by the formula). P begins at zero
(the paper's identity matters only for a client's own model, which it has anyway), and epsilon does not decay.
Uploads of a round are seen in the next one: every client of a round works on the models of before it.
"""

from dataclasses import replace

import numpy as np

import fedtailor as ft
from fedtailor.data import rng
from tests.oracles import harness
from tests.oracles.harness import BIASED, SEED, Case, D, K, Setting, close
from tests.oracles.risks import cross_entropy


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, risk, validation, downloads=None):
    models = [np.array(start, dtype=float) for _ in clients]
    P = np.zeros((len(clients), len(clients)))
    history = []
    for t in range(rounds):
        before, mixed = [w.copy() for w in models], {}
        for i in cohorts(t):
            others = [n for n in range(len(clients)) if n != i] if downloads is None else downloads(t, i, P[i])
            gains = weigh(before[i], [before[n] for n in others], lambda w, i=i: risk(w, *validation[i]))
            share = shares(gains)
            w = before[i] + sum(
                (s * (before[n] - before[i]) for s, n in zip(share, others, strict=True)), np.zeros_like(before[i])
            )
            for n, gain in zip(others, gains, strict=True):
                P[i, n] += gain
            mixed[i] = dict(zip(others, share, strict=True))
            X, y = clients[i]
            for idx in batches(t, i, "train"):
                w = w - lr * grad(w, X[idx], y[idx])
            models[i] = w
        history.append({"shared": None, "personal": [w.copy() for w in models], "mixed": mixed, "affinities": P.copy()})
    return history


def weigh(own, others, risk):
    """Equation (3)."""
    here = risk(own)
    apart = [np.sqrt(((theta - own) ** 2).sum()) for theta in others]
    return [(here - risk(theta)) / far if far > 0 else 0.0 for theta, far in zip(others, apart, strict=True)]


def shares(gains):
    """Their positive parts, normalised."""
    total = sum(max(0.0, gain) for gain in gains)
    return [max(0.0, gain) / total if total > 0 else 0.0 for gain in gains]


def sampled(count, epsilon, cohorts, coin, chance):
    """Of those who have sent a model, ``count`` with the highest affinity, or any if the coin is below epsilon.

    ``coin(t, i)`` and ``chance(t, i)[n]`` are drawn from [0, 1); the higher chance goes first among equals.
    """

    def downloads(t, i, p):
        known = {n for earlier in range(t) for n in cohorts(earlier)} - {i}
        by_chance = coin(t, i) < epsilon
        return sorted(known, key=lambda n: (0.0 if by_chance else p[n], chance(t, i)[n]), reverse=True)[:count]

    return downloads


def validation():
    """Rows of the clients' own kinds, seven each."""
    draw = np.random.default_rng(11)
    return [(draw.normal(size=(7, D)) + 0.4 * i, draw.integers(0, K, 7)) for i in range(len(harness.SIZES))]


def alike(kind):
    """All labels by one law: then others' models are good on training rows too."""
    law = np.random.default_rng(13).normal(size=(D, K))
    return [(x, (x @ law).argmax(1)) for x, _ in harness.rows(kind)]


def drawn(name, t, *ranks):
    """The package's numbers in [0, 1): clients go by their ranks there."""
    words = rng.mix(SEED, rng.purpose(f"FedFomo {name}"), t, *ranks)
    return (words >> np.uint64(11)) / 2**53


def told(trial):
    """Validation rows, or training rows where there are none, and the package's coins."""
    method, ranks = trial.plan.algorithm, trial.plan.ranks
    return {
        "lr": method.lr,
        "risk": cross_entropy,
        "validation": trial.clients if trial.case.problem.val is None else validation(),
        "downloads": sampled(
            method.downloads,
            method.explore,
            trial.cohort,
            coin=lambda t, i: drawn("explore", t, ranks[i]),
            chance=lambda t, i: drawn("model", t, ranks[i], ranks),
        ),
    }


SETTINGS = (Setting(None, 4), Setting(None, 3), Setting(4, 3), Setting(4, 2))
METHOD = ft.FedFomo(lr=0.2, epochs=2, explore=0.0)
VALIDATED = replace(BIASED, val=validation)
CASES = (
    Case(METHOD, told, "all models", SETTINGS, VALIDATED, 6),
    Case(replace(METHOD, lr=0.05), told, "on training rows", SETTINGS, replace(BIASED, clients=alike), 6),
    Case(replace(METHOD, downloads=1), told, "the best model", SETTINGS, VALIDATED, 6),
    Case(replace(METHOD, downloads=2, explore=0.5), told, "some by chance", SETTINGS, VALIDATED, 6),
    Case(replace(METHOD, downloads=1, explore=1.0), told, "one by chance", SETTINGS, VALIDATED, 6),
)


def agree(trial, seen, entry):
    """And the server's affinities."""
    harness.agree(trial, seen, entry)
    affinities = seen.server["affinity"].numpy()[np.ix_(trial.plan.ranks, trial.plan.ranks)]
    close(affinities, entry["affinities"], trial, "affinities", seen)


def afterwards(trial, history):
    harness.learned(trial, history)
    mixed = [share for entry in history for shares in entry["mixed"].values() for share in shares.values()]
    assert any(share > 0 for share in mixed)
    assert any(share == 0 for share in mixed)
    assert history[-1]["affinities"].min() < 0  # what was worse is remembered as well
    if trial.case.label == "the best model":  # ... which is another than one by chance
        by_chance = replace(trial, case=replace(trial.case, method=replace(trial.case.method, explore=1.0))).follow()
        assert harness.gap(by_chance[-1]["personal"], history[-1]["personal"]) > 1e-3
