"""FedAvg, local training, fine-tuning and FedProx in two stages over the heterogeneity R."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtailor as ft
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, column

FEDAVG, LOCAL, TUNED = "FedAvg", "local", "fine-tuning"
NONE, MIDDLE, LARGE = "FedProx, lam = 0", "FedProx, lam = 0.44", "FedProx, lam = 4"


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the clients' mean accuracy on fresh rows, averaged over the repetitions, with the steps of Appendix D."""
    step = {"lr": 0.2, "epochs": 5}
    methods = {
        FEDAVG: ft.FedAvg(**step, server_lr=0.8),
        LOCAL: ft.Local(**step),  # five epochs in each of twenty rounds: their hundred
        TUNED: ft.FedAvgFT(**step, server_lr=0.8, finetune_epochs=15),
        NONE: ft.FedProxPersonal(**step, lam=0.0, final_epochs=5),
        MIDDLE: ft.FedProxPersonal(**step, lam=0.44, server_lr=0.8, final_epochs=5),
        LARGE: ft.FedProxPersonal(**step, lam=4.0, server_lr=0.2, final_epochs=5),
    }
    options: dict[str, Any] = {
        "batch_size": 16,
        "bias": False,
        "evaluate_every": 0,
        "engine": "vectorized",
        "rounds": 20,
        "seed": seed,
    }
    out = []
    for R in settings["R"]:
        reached: dict[str, list[float]] = {label: [] for label in methods}
        for repetition in range(settings["repetitions"]):
            design = {"clients": 5, "rows": 100, "d": settings["d"], "test_rows": settings["test_rows"]}
            data = ft.Federation.load("minimax-logistic", **design, R=R, seed=1000 * seed + repetition)
            for label, method in methods.items():
                reached[label].append(ft.run(method, data, **options).summary["acc_personal"])
        out += [{"R": R, "method": label, "accuracy": float(np.mean(values))} for label, values in reached.items()]
    return out


def behind(rows: Rows, label: str) -> float:
    """Return how far a method falls behind the better of FedAvg and local training, at the worst R."""
    return float((best(rows) - column(rows, "accuracy", method=label)).max())


def best(rows: Rows) -> np.ndarray:
    return np.maximum(column(rows, "accuracy", method=FEDAVG), column(rows, "accuracy", method=LOCAL))


def lead(rows: Rows) -> np.ndarray:
    """FedAvg's accuracy minus local training's, over R."""
    return column(rows, "accuracy", method=FEDAVG) - column(rows, "accuracy", method=LOCAL)


def crossing(rows: Rows) -> float:
    """Return the R at which FedAvg's lead is gone, on a line between the two measured ones around it."""
    gaps, R = lead(rows), column(rows, "R", method=LOCAL)
    k = int(np.flatnonzero((gaps[:-1] > 0) & (gaps[1:] <= 0))[0]) if ((gaps[:-1] > 0) & (gaps[1:] <= 0)).any() else -1
    return float(np.nan if k < 0 else R[k] + (R[k + 1] - R[k]) * gaps[k] / (gaps[k] - gaps[k + 1]))


def crossings(rows: Rows) -> float:
    return float((np.diff(np.sign(lead(rows))) != 0).sum())


def apart(rows: Rows, a: str, b: str) -> float:
    return float(np.abs(column(rows, "accuracy", method=a) - column(rows, "accuracy", method=b)).mean())


LAPTOP = {"d": 100, "test_rows": 500, "R": [0.0, 4.0, 10.0, 20.0], "repetitions": 1}
EXPERIMENT = Experiment(
    "Accuracy over heterogeneity",
    "Figure 1, both panels, and Appendix D",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "R": [float(R) for R in range(0, 21, 2)], "repetitions": 100}},
    measure,
    Figure("R", "accuracy", "method", "heterogeneity R", "accuracy"),
    (
        Claim("FedAvg is ahead of local training where clients are alike", lambda rows: float(lead(rows)[0]), above=0.0),
        Claim("Local training is ahead of FedAvg where clients differ most", lambda rows: float(-lead(rows)[-1]), above=0.0),
        Claim("They cross once", crossings, above=0.5, below=1.5),
        Claim("They cross between the least and the largest R", crossing, above=0.0, below=20.0),
        Claim(
            "FedAvg's accuracy falls with R",
            lambda rows: float(np.diff(column(rows, "accuracy", method=FEDAVG)[[0, -1]])[0]),
            below=0.0,
        ),
        Claim(
            "Fine-tuning follows the better of the two (farthest behind, at any R)", lambda rows: behind(rows, TUNED), below=0.05
        ),
        Claim("FedProx with lam = 0 is local training (mean distance)", lambda rows: apart(rows, NONE, LOCAL), below=0.02),
        Claim(
            "FedProx with lam = 4 is nearer to FedAvg than to local training",
            lambda rows: apart(rows, LARGE, LOCAL) - apart(rows, LARGE, FEDAVG),
            above=0.0,
            must=False,
        ),
        Claim(
            "A middle lam follows the better of the two (farthest behind, at any R)",
            lambda rows: behind(rows, MIDDLE),
            below=0.05,
        ),
        Claim(
            "It is never as far behind as the worse of the two",
            lambda rows: max(behind(rows, FEDAVG), behind(rows, LOCAL)) - behind(rows, MIDDLE),
            above=0.0,
        ),
    ),
)
