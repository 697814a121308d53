"""MNIST by writer: clients as they are."""

from __future__ import annotations

from fedtailor.papers.fair_routing import PAPER, TUNED, fair

LAPTOP = {
    "set": "mnist",
    "clients": 300,
    "model": "mlp:64",
    "rounds": 300,
    "cohort": 10,
    "batch_size": 20,
    "epochs": 1,
    "tune_epochs": 5,
    "tuned": {TUNED: {"lr": 0.3, "finetune_lr": 0.3}, PAPER: {"lr": 0.3, "gamma": 0.1}},
}
EXPERIMENT = fair(
    "Routing on MNIST by writer", LAPTOP, {"clients": None, "model": "cnn2", "rounds": 1500, "epochs": 3, "tune_epochs": 3}
)
