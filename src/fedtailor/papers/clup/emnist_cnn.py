"""EMNIST, clients with 30, 40 or all of 47 classes; two convolutions at the laptop's scale, five at the paper's."""

from __future__ import annotations

from fedtailor.papers.label_skew import skew

LAPTOP = {
    **{"set": "emnist", "model": "cnn2:8,16", "clients": 10, "rows": 300, "classes": [30, 40, 47]},
    **{"lams": [0.1, 0.5, 1.0], "pfedme": [], "lr": 0.1, "epochs": 2, "batch_size": 16, "rounds": 8},
}
FULL = {"model": "cnn5", "clients": 100, "rows": 1100, "pfedme": [0.1, 0.5, 1.0], "lr": 0.01, "epochs": 10, "rounds": 50}
EXPERIMENT = skew("EMNIST, convolutions", LAPTOP, FULL, "local .611, FedCLUP .628, .642, .667, global .661")
