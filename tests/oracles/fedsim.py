"""FedSim: Pillutla et al. (2022), both parts in one descent; the transcription is that of FedPer."""

import fedtailor as ft
from tests.oracles.fedper import run
from tests.oracles.harness import SPLIT, Case

__all__ = ["CASES", "run"]

CASES = (Case(ft.FedSim(lr=0.2, personal="bias", steps=3), {"lr": 0.2, **SPLIT}),)
