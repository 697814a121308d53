"""MNIST by a network of two convolutions, clients with 2, 6 or all of the classes."""

from __future__ import annotations

from fedtailor.papers.label_skew import skew

LAPTOP = {
    **{"set": "mnist", "model": "cnn2:8,16", "clients": 10, "rows": 100, "classes": [2, 6, 10]},
    **{"lams": [0.2, 0.5, 2.5], "pfedme": [], "lr": 0.1, "epochs": 2, "batch_size": 16, "rounds": 10},
}
FULL = {"model": "cnn2", "clients": 100, "rows": 700, "pfedme": [0.2, 0.5, 2.5], "lr": 0.01, "epochs": 5, "rounds": 20}
EXPERIMENT = skew("MNIST, two convolutions", LAPTOP, FULL, "local .819, FedCLUP .875, .889, .903, global .910")
