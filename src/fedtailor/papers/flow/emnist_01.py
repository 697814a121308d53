"""EMNIST with 47 classes, Dirichlet 0.1: clients with few classes each."""

from __future__ import annotations

from fedtailor.papers.fair_routing import PAPER, TUNED, fair

LAPTOP = {
    "set": "emnist",
    "partition": "dirichlet:0.1",
    "clients": 300,
    "rows": 100,
    "model": "mlp:64",
    "rounds": 300,
    "cohort": 10,
    "batch_size": 20,
    "epochs": 1,
    "tune_epochs": 5,
    "tuned": {TUNED: {"lr": 0.3, "finetune_lr": 0.1}, PAPER: {"lr": 0.1, "gamma": 0.1}},
}
FULL = {"rows": 300, "model": "cnn2", "rounds": 1500, "epochs": 3, "tune_epochs": 3}
EXPERIMENT = fair("Routing on EMNIST-47, Dirichlet 0.1", LAPTOP, FULL)
