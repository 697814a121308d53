"""Generated rows of two kinds, everybody's law and the client's own, which the row shows."""

from __future__ import annotations

from fedtailor.papers.fair_routing import PAPER, TUNED, fair

LAPTOP = {
    "set": "instances",
    "clients": 300,
    "law": {"share": 0.5, "rows": 120, "visible": 4.0},
    "model": "mlp:32",
    "rounds": 300,
    "cohort": 10,
    "batch_size": 20,
    "epochs": 1,
    "tune_epochs": 5,
    "tuned": {TUNED: {"lr": 0.3, "finetune_lr": 0.3}, PAPER: {"lr": 0.3, "gamma": 0.001}},
}
EXPERIMENT = fair("Routing where rows are of two kinds", LAPTOP, {"rounds": 1500, "epochs": 3, "tune_epochs": 3})
