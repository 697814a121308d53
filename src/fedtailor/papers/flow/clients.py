"""Who benefits: MNIST by writer, clients whose personal model is better than the shared one, and rows that only one has right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fedtailor as ft
from fedtailor.papers.base import Claim, Experiment, Figure, Pieces, Rows, Settings, one
from fedtailor.papers.fair_routing import load, options

FLOW = "Flow"
RIVALS = ("FedAvgFT", "kNN-Per", "APFL", "Ditto", "FedRep", "LG-FedAvg", "HypCluster")


def methods(settings: Settings) -> Mapping[str, ft.Algorithm]:
    """Flow with the step size and gamma that validation rows chose; the others with the same step size."""
    lr, epochs = settings["lr"], settings["tune_epochs"]
    return {
        FLOW: ft.Flow(lr=lr, local_epochs=epochs, gamma=settings["gamma"]),
        "FedAvg": ft.FedAvg(lr=lr),
        "FedAvgFT": ft.FedAvgFT(lr=lr, finetune_epochs=epochs),
        "kNN-Per": ft.KNNPer(lr=lr),
        "APFL": ft.APFL(lr=lr, alpha=0.25),
        "Ditto": ft.Ditto(lr=lr, lam=0.1, personal_epochs=epochs),
        "FedRep": ft.FedRep(lr=lr, personal_epochs=epochs),
        "LG-FedAvg": ft.LGFedAvg(lr=lr),
        "HypCluster": ft.HypCluster(lr=lr),
    }


def measure(settings: Settings, seed: int, name: str) -> list[dict[str, Any]]:
    """Return a method's accuracies, its clients that benefit, and the rows that one or both of its models have right."""
    run = ft.run(methods(settings)[name], load(settings, seed), settings["model"], **options(settings, seed))
    keys = ("share_benefit", "global_only", "personal_only", "both_correct")
    accuracy = {"personal": run.summary["acc_personal"], "shared": run.summary["acc_global"]}
    return [{"method": name, **accuracy, **{key: run.summary.get(key) for key in keys}}]


def known(rows: Rows, key: str) -> list[float]:
    """Return a number of the rivals that have it."""
    return [float(row[key]) for row in rows if row["method"] in RIVALS and row[key] is not None]


def flow(rows: Rows, key: str) -> float:
    return one(rows, key, method=FLOW)


LAPTOP = {
    **{"set": "mnist", "clients": 40, "model": "mlp:64", "rounds": 60, "cohort": 10, "batch_size": 20, "tune_epochs": 5},
    **{"lr": 0.3, "gamma": 0.1},
}
EXPERIMENT = Experiment(
    "Who benefits, MNIST by writer",
    "Tables 2 and 3, Figure 2",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "clients": None, "model": "cnn", "rounds": 1500, "tune_epochs": 3, "gamma": 0.01}},
    Pieces(lambda settings: list(methods(settings)), measure),
    Figure("shared", "personal", "method", "accuracy of the shared model", "accuracy of the personal models"),
    (
        Claim("Personal models: Flow is above every rival", lambda rows: flow(rows, "personal") - max(known(rows, "personal")),
              above=0.0, must=False, theirs="+1.3 points, CIFAR-10 (0.1)"),
        Claim("Shared model: Flow's is above FedAvg's", lambda rows: flow(rows, "shared") - one(rows, "shared", method="FedAvg"),
              above=0.0, must=False, theirs="+5.0 points over FedAvgFT's, CIFAR-10 (0.1)"),
        Claim("Flow has the largest share of clients that benefit",
              lambda rows: flow(rows, "share_benefit") - max(known(rows, "share_benefit")), above=0.0, must=False,
              theirs="98.3 % against 97.2 %, CIFAR-10 (0.1)"),
        Claim("Flow has the fewest rows that only the shared model has right",
              lambda rows: flow(rows, "global_only") - min(known(rows, "global_only")), below=0.0, must=False,
              theirs="1.1 to 2.4 % against 4.7 to 7.9 %, Stackoverflow"),
        Claim("Flow has the most rows that both have right",
              lambda rows: flow(rows, "both_correct") - max(known(rows, "both_correct")), above=0.0, must=False,
              theirs="above 0"),
        Claim("With some rival personalisation hurts a tenth of the clients or more (least share that benefits)",
              lambda rows: min(known(rows, "share_benefit")), below=0.9, must=False, theirs="68.9 %, Shakespeare"),
    ),
    convex=False,
)  # fmt: skip
