"""W1: softmax regression (d 60, 10 classes) and an MLP with 32 hidden units, 1,000 clients x 100 rows, 10 % a round,
5 epochs, batch 16. The vectorized engine against the bare loop on one thread."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fedtailor as ft
from benchmarks import bare
from benchmarks.players import Player
from benchmarks.timing import turn_about
from fedtailor.engine.vectorized import VectorizedEngine

CLIENTS, ROWS, D, CLASSES, COHORT, EPOCHS, BATCH, LR, LAM = 1000, 100, 60, 10, 100, 5, 16, 0.05, 0.5


def run(goes: int = 9) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pairs = [(torch.randn(ROWS, D), torch.randint(CLASSES, (ROWS,))) for _ in range(CLIENTS)]
    federation = ft.Federation.from_arrays(pairs, [(x[:2], y[:2]) for x, y in pairs])
    some = pairs[:COHORT]
    linear, mlp = nn.Linear(D, CLASSES), nn.Sequential(nn.Linear(D, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    clup, ditto = ([{k: v.clone() for k, v in linear.state_dict().items()} for _ in some] for _ in range(2))

    def ours(algorithm: ft.Algorithm, model: str) -> Player:
        return Player(algorithm, federation, model, BATCH, COHORT, VectorizedEngine)

    cases = {
        "FedAvg, linear": (
            30,
            ours(ft.FedAvg(lr=LR, epochs=EPOCHS), "linear"),
            lambda: bare.fedavg_round(linear, some, EPOCHS, BATCH, LR),
        ),
        "FedCLUP, linear": (
            50,
            ours(ft.FedCLUP(lam=LAM, lr=LR, epochs=EPOCHS), "linear"),
            lambda: bare.fedclup_round(linear, clup, some, EPOCHS, BATCH, LR, LAM),
        ),
        "Ditto, linear": (
            50,
            ours(ft.Ditto(lam=LAM, lr=LR, epochs=EPOCHS), "linear"),
            lambda: bare.ditto_round(linear, ditto, some, EPOCHS, BATCH, LR, LAM),
        ),
        "FedAvg, MLP 32": (
            30,
            ours(ft.FedAvg(lr=LR, epochs=EPOCHS), "mlp:32"),
            lambda: bare.fedavg_round(mlp, some, EPOCHS, BATCH, LR),
        ),
    }
    rows = []
    for name, (wanted, player, loop) in cases.items():
        seconds = turn_about({"ours": player, "bare": loop}, goes)
        ratio = seconds["bare"] / seconds["ours"]
        rows.append(
            {
                "case": f"W1 {name}",
                "ours_ms": 1e3 * seconds["ours"],
                "bare_ms": 1e3 * seconds["bare"],
                "figure": f"{ratio:.1f}x faster",
                "wanted": f"at least {wanted}x",
                "met": ratio >= wanted,
            }
        )
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
