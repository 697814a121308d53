"""FedRep: Collins et al. (2021), Algorithm 1: many steps on the head, then on the body; the transcription is that of FedAlt."""

import fedtailor as ft
from tests.oracles.fedalt import run
from tests.oracles.harness import SPLIT, Case

__all__ = ["CASES", "run"]

TOLD = {"lr": 0.2, "personal_lr": 0.2, **SPLIT}
CASES = (Case(ft.FedRep(lr=0.2, personal="bias", steps=1, personal_steps=6), TOLD),)
