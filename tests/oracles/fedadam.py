"""FedAdam: Reddi et al. (2021), Algorithm 2; the transcription is that of fedopt.py."""

import fedtailor as ft
from tests.oracles.fedopt import run
from tests.oracles.harness import Case

__all__ = ["CASES", "run"]

TOLD = {"lr": 0.2, "server_lr": 0.3, "beta1": 0.8, "beta2": 0.9, "tau": 0.05}
CASES = (Case(ft.FedAdam(**TOLD, steps=3), {**TOLD, "rule": "adam"}),)
