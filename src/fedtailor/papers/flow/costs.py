"""What a client keeps and sends, in models w and routers psi: Table 4's formulas beside what is counted in a run."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtailor as ft
from fedtailor import tree
from fedtailor.algorithms.flow import TABLE_4
from fedtailor.papers.base import Claim, Experiment, Figure, Settings, one

METHODS: dict[str, ft.Algorithm] = {
    "FedAvgFT": ft.FedAvgFT(),
    "Ditto": ft.Ditto(),
    "APFL": ft.APFL(),
    "HypCluster": ft.HypCluster(),
    "Flow": ft.Flow(local_epochs=1),
}


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return a row per method: numbers sent by a client in a round, on the wire, over the formula's."""
    draw = np.random.default_rng(seed)
    pairs = [(draw.random((20, settings["features"]), np.float32), np.arange(20) % 10) for _ in range(3)]
    federation = ft.Federation.from_arrays(pairs, pairs, classes=[str(i) for i in range(10)])
    runs = {label: ft.run(method, federation, settings["model"], rounds=1, seed=seed) for label, method in METHODS.items()}
    w = tree.size(runs["FedAvgFT"].shared["model"])
    psi = runs["Flow"].summary["routing"]["router_parameters"]
    out = []
    for label, run in runs.items():
        kept, sent = (a * w + b * psi for a, b in TABLE_4[label])
        counted = run.summary["bytes_up"] / 4 / sum(line["cohort"] for line in run.history)
        out.append(
            {"method": label, "kept": kept, "sent": sent, "ratio": counted / sent, "trained": run.summary["trained_parameters"]}
        )
    return out


def on_the_wire(label: str) -> Claim:
    words = f"{label}: sent on the wire, over Table 4's formula"
    return Claim(words, lambda rows: one(rows, "ratio", method=label), above=0.99, below=1.01, must=False, theirs="1")


EXPERIMENT = Experiment(
    "What a client keeps and sends",
    "Table 4",
    {"laptop": {"features": 784, "model": "mlp:64,32"}, "paper": {"features": 784, "model": "mlp:512,256"}},
    measure,
    Figure("sent", "kept", "method", "parameters sent", "parameters kept"),
    (
        *(on_the_wire(label) for label in METHODS),
        Claim("Flow trains what Table 4 says it keeps, two models and a router (ratio)",
              lambda rows: one(rows, "trained", method="Flow") / one(rows, "kept", method="Flow"), above=0.999, below=1.001,
              must=False, theirs="1"),
        Claim("Flow keeps less than APFL (ratio)",
              lambda rows: one(rows, "kept", method="Flow") / one(rows, "kept", method="APFL"),
              below=1.0, must=False, theirs="0.67, Stackoverflow"),
    ),
    convex=False,
)  # fmt: skip
