"""MNIST by logistic regression, clients with 2, 6 or all of the classes."""

from __future__ import annotations

from fedtailor.papers.label_skew import skew

LAPTOP = {
    **{"set": "mnist", "model": "linear", "clients": 10, "rows": 150, "classes": [2, 6, 10]},
    **{"lams": [0.5, 1.5, 2.5], "pfedme": [0.5, 1.5, 2.5], "lr": 0.05, "epochs": 5, "batch_size": 32, "rounds": 20},
}
FULL = {"clients": 100, "rows": 700, "lr": 0.01}
EXPERIMENT = skew("MNIST, logistic regression", LAPTOP, FULL, "local .783, FedCLUP .812, .821, .831, global .839")
