"""CIFAR-10 by a network of three convolutions, clients with 2, 6 or all of the classes."""

from __future__ import annotations

from fedtailor.papers.label_skew import skew

LAPTOP = {
    **{"set": "cifar10", "model": "cnn3:8,16,16", "clients": 10, "rows": 200, "classes": [2, 6, 10]},
    **{"lams": [0.1, 0.5, 1.0], "pfedme": [], "lr": 0.1, "epochs": 2, "batch_size": 16, "rounds": 10},
}
FULL = {"model": "cnn3", "clients": 100, "rows": 600, "pfedme": [0.1, 0.5, 1.0], "lr": 0.01, "epochs": 10, "rounds": 50}
EXPERIMENT = skew("CIFAR-10, three convolutions", LAPTOP, FULL, "local .624, FedCLUP .610, .671, .730, global .804")
