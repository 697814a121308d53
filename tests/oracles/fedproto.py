"""FedProto: Tan et al. (2022), Algorithm 1. What travels is the mean feature of every class, never a model.

Client, from its own kept model: each step descends on the mean cross-entropy plus lam times the distance of features from the
prototypes it received, mean over the rows of the batch of |z_r - C[y_r]|^2 / D, D the number of features (the released code:
the mean squared error of the features against their class's prototype, over rows and features; the paper's L_R sums a distance
of the class means). A class that has no prototype yet has no such term: its rows count as 0 and are still among the rows that
the mean is over. After its steps it sends C_i[c], the mean feature of its training rows of class c, for the classes it has.
Server: C[c] is the mean of the C_i[c] of this round's clients that have the class, weighed by their rows of it (``by="rows"``,
the paper's |D_ij|/N_j without its further factor 1/|N_j|, which would shrink all prototypes) or equally (``by="clients"``, the
released code). A class nobody of the round has keeps its prototype.
A client predicts with its own model's logits; ``predict="nearest"`` of the paper, the class of the nearest prototype, is
`nearest`.

The first round has no prototypes, hence no pull. "shared" is (C [classes, D], which classes have one).
Models are dicts of arrays as in networks.py. The features are what the last layer multiplies, after the ReLU.
"""

from dataclasses import replace

import numpy as np

import fedtailor as ft
from tests.oracles import networks
from tests.oracles.harness import NETWORKS, SOMETIMES_LACKING, STEPS_AND_EPOCHS, Case, close, gap, lacking
from tests.oracles.harness import D as INPUTS


def run(grad, clients, start, *, rounds, batches, cohorts, weights, lr, lam, by="rows"):
    head = f"{networks.paths(start)[-1]}.weight".lstrip(".")
    classes, D = start[head].shape
    own = [{name: np.array(value, dtype=float) for name, value in start.items()} for _ in clients]
    C, known = np.zeros((classes, D)), np.zeros(classes, dtype=bool)
    history = []
    for t in range(rounds):
        total, mass = np.zeros((classes, D)), np.zeros(classes)
        for i in cohorts(t):
            X, y = clients[i]
            w = own[i]
            for idx in batches(t, i, "train"):
                slope, statistics = grad(w, X[idx], y[idx])
                pull = feature_gradient(w, X[idx], y[idx], C, known)
                w = {
                    name: statistics[name] if name in statistics else w[name] - lr * (slope[name] + lam * pull.get(name, 0.0))
                    for name in w
                }
            own[i] = w
            z = features(w, X)
            for c in np.unique(y):
                p = (y == c).sum() if by == "rows" else 1.0
                total[c] += p * z[y == c].mean(axis=0)
                mass[c] += p
        here = mass > 0
        C = np.where(here[:, None], total / np.where(here, mass, 1.0)[:, None], C)
        known = known | here
        history.append({"shared": (C.copy(), known.copy()), "personal": list(own)})
    return history


def features(model, X):
    """In evaluation mode."""
    return networks._forward(model, X, training=False)[1][-1][1]


def feature_gradient(model, X, y, C, known):
    """Of mean_r mean_d (z_rd - C[y_r]_d)^2 over the rows whose class is known, by parameter of the body (no norms in it)."""
    _, tape, _ = networks._forward(model, X, training=True)
    z = tape[-1][1]
    d = 2.0 * (z - C[y]) * known[y][:, None] / z.size * (z > 0)
    found = {}
    for k, (path, seen, _) in reversed(list(enumerate(tape[:-1]))):
        assert not networks.is_norm(model, path)
        weight, bias = networks._names(path)
        found |= {weight: d.T @ seen, bias: d.sum(axis=0)}
        d = d @ model[weight] * (seen > 0 if k else 1.0)
    return found


def nearest(model, X, C):
    z = features(model, X)
    return ((z[:, None] - C[None]) ** 2).sum(axis=2).argmin(axis=1)


# The paper's lam multiplies a distance, the sum over features, and so does the package's; that of the code above, as of the
# authors', a mean over them.
LAM = 0.3
METHOD = ft.FedProto(lr=0.3, lam=LAM)


def case(name, features, label="", settings=STEPS_AND_EPOCHS, **changes):
    told = {"lr": 0.3, "lam": LAM * features}
    return Case(METHOD, told, label or name, settings, replace(NETWORKS[name], **changes), 6)


CASES = (
    case("linear", INPUTS),
    case("mlp", 5),
    case("mlp", 5, "classes missing", SOMETIMES_LACKING, clients=lacking),
)


def agree(trial, seen, entry):
    """Prototypes, which classes have one, and every client's model."""
    C, known = entry["shared"]
    close(seen.shared["prototypes"], C, trial, "prototypes", seen)
    close(seen.shared["known"], known, trial, "which prototypes there are", seen)
    for i, theirs in enumerate(entry["personal"]):
        close(seen.logits[i], trial.case.problem.answer(theirs), trial, f"client {i}", seen)
        if seen.store.born[i]:
            close(seen.kept(i)["model"], theirs, trial, f"the model of client {i}", seen)


def afterwards(trial, history):
    assert gap(history[-1]["personal"][0], trial.start) > trial.case.learned
    assert history[-1]["shared"][1].all()
    if trial.case.label != "linear":  # the pull has done something
        plain = replace(trial, case=replace(trial.case, told={**trial.case.told, "lam": 0.0})).follow()
        assert gap(plain[-1]["personal"], history[-1]["personal"]) > 1e-2
    if trial.case.label == "classes missing" and trial.setting.cohort == 2:
        kept_while_nobody_has_it(trial, [entry["shared"][0] for entry in history])


def kept_while_nobody_has_it(trial, prototypes):
    """The third class, which only the second client has, and which others' rounds leave alone."""
    assert [1 in trial.cohort(t) for t in range(6)] == [True, True, False, False, False, True]
    assert gap(prototypes[1][2], prototypes[4][2]) == 0 < np.abs(prototypes[4][2]).max()
    assert gap(prototypes[1][:2], prototypes[4][:2]) > 1e-3
