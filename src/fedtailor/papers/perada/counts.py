"""How many parameters a client trains and sends: a ResNet-18 and ten classes, counted in a run of one round."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtailor as ft
from fedtailor import tree
from fedtailor.papers.base import Claim, Experiment, Figure, Settings, one
from fedtailor.papers.frozen_images import network

SLOW: dict[str, Any] = {"lr": 1e-5}  # nothing is learnt: parameters are counted
# label: (method, what moves, what the paper says is trained and sent, in millions)
METHODS: dict[str, tuple[Any, str, float, float]] = {
    "Standalone": (ft.Local(**SLOW), "full", 11.18, 0.0),
    "FedAvg+FT": (ft.FedAvgFT(**SLOW), "full", 11.18, 11.18),
    "pFedMe": (ft.PFedMe(**SLOW, inner_lr=1e-5), "full", 22.36, 11.18),
    "APFL": (ft.APFL(**SLOW), "full", 22.36, 11.18),
    "Ditto": (ft.Ditto(**SLOW), "full", 22.36, 11.18),
    "FedBN": (ft.FedBN(**SLOW), "full", 11.18, 11.17),
    "LG-FedAvg": (ft.LGFedAvg(**SLOW), "full", 11.18, 0.005),
    "FedRep": (ft.FedRep(**SLOW, personal_epochs=1), "full", 11.18, 11.17),
    "FedAlt, adapter": (ft.FedAlt(**SLOW, personal="adapter"), "both", 12.59, 11.18),
    "FedSim, adapter": (ft.FedSim(**SLOW, personal="adapter"), "both", 12.59, 11.18),
    "PerAda": (ft.PerAda(**SLOW, kd_steps=0), "adapters", 2.82, 1.41),
}


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    rows = settings["clients"] * settings["rows"]
    x, y = draw.random((rows, 3, 32, 32), np.float32), np.arange(rows) % 10
    pairs = [(x[i :: settings["clients"]], y[i :: settings["clients"]]) for i in range(settings["clients"])]
    federation = ft.Federation.from_arrays(pairs, pairs, classes=[str(i) for i in range(10)])
    out = []
    for label, (method, part, trained, sent) in METHODS.items():
        name = network(settings["network"], part)
        run = ft.run(method, federation, name, rounds=1, batch_size=settings["rows"], engine="loop", evaluate_every=0, seed=seed)
        counted = tree.size(tree.trainable(run.shared["model"])) if "model" in run.shared else 0
        numbers = {"trained": run.summary["trained_parameters"] / 1e6, "sent": counted / 1e6}
        out.append({"method": label, **numbers, "their_trained": trained, "their_sent": sent})
    return out


def same(label: str, key: str, theirs: float) -> Claim:
    """Return the paper's number, as far as it is printed."""
    digits = 0.0005 if 0 < theirs < 0.01 else 0.005
    words = f"{label}: parameters {key}, in millions"
    return Claim(words, lambda rows: one(rows, key, method=label), above=theirs - digits, below=theirs + digits, must=False,
                 theirs=f"{theirs:g}")  # fmt: skip


EXPERIMENT = Experiment(
    "Parameters trained and sent",
    "Table 1",
    {"laptop": {"network": "resnet18", "clients": 2, "rows": 4}, "paper": {"network": "resnet18", "clients": 20, "rows": 4}},
    measure,
    Figure("sent", "trained", "method", "millions sent", "millions trained"),
    tuple(
        same(label, key, number)
        for label, (_, _, trained, sent) in METHODS.items()
        for key, number in (("trained", trained), ("sent", sent))
    ),
    convex=False,
)
