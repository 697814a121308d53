"""FedAvgM: Hsu et al. (2019), momentum on the server; the transcription is that of fedopt.py."""

import fedtailor as ft
from tests.oracles.fedopt import run
from tests.oracles.harness import Case

__all__ = ["CASES", "run"]

TOLD = {"lr": 0.2, "server_lr": 0.7, "beta1": 0.6}
CASES = (Case(ft.FedAvgM(**TOLD, steps=3), {**TOLD, "rule": "avgm", "beta2": 0.0, "tau": 0.0}),)
