"""EMNIST with 47 classes, Dirichlet 0.6: clients with many classes each."""

from __future__ import annotations

from fedtailor.papers.fair_routing import PAPER, TUNED, fair
from fedtailor.papers.flow import emnist_01

BEST = {TUNED: {"lr": 0.3, "finetune_lr": 0.1}, PAPER: {"lr": 0.3, "gamma": 0.1}}
LAPTOP = {**emnist_01.LAPTOP, "partition": "dirichlet:0.6", "tuned": BEST}
EXPERIMENT = fair("Routing on EMNIST-47, Dirichlet 0.6", LAPTOP, emnist_01.FULL)
