"""LG-FedAvg: Liang et al. (2020), first layers stay at home; the transcription is that of FedPer, split the other way."""

import fedtailor as ft
from tests.oracles.fedper import run
from tests.oracles.harness import BIASES, WEIGHTS, Case

__all__ = ["CASES", "run"]

CASES = (Case(ft.LGFedAvg(lr=0.2, personal="weight", steps=3), {"lr": 0.2, "shared_at": BIASES, "personal_at": WEIGHTS}),)
