"""``make bench-methods``: every method on mnist5k, two classes per client, tuned on validation; docs/results/methods.md."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedtailor as ft
from fedtailor.algorithms import METHODS, registry
from fedtailor.data.pool import dealt
from fedtailor.data.readers import images
from fedtailor.report.page import write

STEPS = 18  # of a client in a round, at most
CLIENTS, ROUNDS, EPOCHS, BATCH, SEEDS, PUBLIC = 20, 30, 2, 16, 3, 50  # PUBLIC rows of each class are unlabelled and known to all
GRID = {"lr": [0.03, 0.1, 0.3], "lam": [0.03, 0.3, 3.0], "mu": [0.01, 0.1, 1.0], "alpha": [0.01, 0.1, 0.5]}
MARGIN = 0.01
# what a method needs said to take part: the group that stays personal, or the public rows
OWN: dict[str, dict[str, Any]] = {
    "HypCluster": {"k": 3},
    "PFedMe": {"lam": 3.0},
    "KNNPer": {"k": 10},
    "AL2SGD": {"mu": 0.1, "smoothness": 10.0},
}
SINGLE = {"L2GD", "AL2SGD"}  # a round is one iteration: they get as many rounds as the others take steps
ONE_MODEL = {"FedAvg", "FedProx", "Scaffold", "FedDyn", "FedDF", "FedAvgM", "FedAdam", "FedYogi"}  # not personalised
# Looked into with two seeds each, same rounds and work.
REASONS = {
    "AL2SGD": "its steps follow from mu and smoothness, which an MLP has not; 10 was guessed, with smoothness=3 and lam=0.03 it "
    "reaches 0.978",
    "FedBN": "only the norms are personal, and clients with two classes want a head of their own; on the same network FedPer "
    "reaches 0.979, norms and head personal 0.983",
    "KNNPer": "no weight is trained for a client: the shared model (0.881) is mixed with the neighbours among its 135 rows; k=1 "
    "and k=3 give 0.948 and 0.950",
    "PerFedAvg": "it adapts by one step; with two epochs, as FedAvgFT has, it reaches 0.970",
    "HypCluster": "the clients' pairs of classes do not fall into three groups; k=5 gives 0.934, k=10 gives 0.960",
}


def federation() -> ft.Federation:
    pool = images.mnist5k()
    seen = np.concatenate([np.flatnonzero(pool.y == label)[:PUBLIC] for label in range(10)])
    rest = np.setdiff1d(np.arange(len(pool.y)), seen)
    fed = dealt(replace(pool, x=pool.x[rest], y=pool.y[rest]), clients=CLIENTS, partition="classes:2")
    return replace(fed, public=torch.from_numpy(pool.x[seen].astype(np.float32) / 255))


def make(name: str, **work: Any) -> ft.Algorithm:
    return registry[name](**work, **OWN.get(name, {}))


def groups() -> dict[str, tuple[dict[str, ft.Algorithm], Any, int]]:
    """Methods by label, the model, and how many times the rounds."""
    most = [m.__name__ for m in METHODS if m.__name__ not in SINGLE | {"FedBN"}]
    normed = {"FedBN": "FedBN", "Local, batch norm": "Local", "FedAvg, batch norm": "FedAvg"}
    return {
        "most": ({name: make(name, epochs=EPOCHS) for name in most}, "mlp", 1),
        "single": ({name: make(name) for name in sorted(SINGLE)}, "mlp", STEPS),
        "normed": ({label: make(name, epochs=EPOCHS) for label, name in normed.items()}, network(), 1),
    }


def network() -> nn.Module:
    """The MLP with a batch norm, which FedBN needs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def row(label: str, runs: list[Any], bar: float) -> str:
    scores = [r.summary["acc_personal"] for r in runs]
    shared = [r.summary["acc_global"] for r in runs if r.summary["acc_global"] is not None]
    mean = float(np.mean(scores))
    if label.split(",")[0] in ONE_MODEL:
        verdict = "one model for all"
    elif mean >= bar - MARGIN:
        verdict = "yes"
    else:
        verdict = f"**no**: {REASONS.get(label, 'not explained')}"
    common = f"{np.mean(shared):.4f}" if shared else "-"
    return f"| {label} | `{runs[0].summary['settings']}` | {mean:.4f} ± {np.std(scores):.4f} | {common} | {verdict} |"


def main(folder: str = "runs/bench-methods") -> None:
    fed = federation()

    def tell(record: dict[str, Any]) -> None:
        if record["round"] == 0:
            print(record["label"], record["stage"], flush=True)

    options: dict[str, Any] = {"batch_size": BATCH, "engine": "vectorized", "seeds": SEEDS, "resume": True, "callback": tell}
    runs: dict[str, Any] = {}
    records: dict[str, Any] = {}
    for group, (methods, model, times) in groups().items():
        grid = {name: values for name, values in GRID.items() if any(hasattr(m, name) for m in methods.values())}
        found = ft.compare(methods, fed, model, rounds=ROUNDS * times, out=f"{folder}/{group}", tune=grid, **options)
        runs |= found.all
        records |= found.records()
    write(records, Path(folder) / "report.html", command="make bench-methods")
    means = {label: float(np.mean([r.summary["acc_personal"] for r in mine])) for label, mine in runs.items()}
    bars = {True: max(means["Local, batch norm"], means["FedAvg, batch norm"]), False: max(means["Local"], means["FedAvg"])}
    ranked = sorted(runs, key=lambda label: -means[label])
    text = (
        "# Every method on one set\n\n"
        f"Written by `make bench-methods`. mnist5k, {CLIENTS} clients with two classes each (`classes:2`), an MLP with 64 hidden "
        f"units, {ROUNDS} rounds of {EPOCHS} epochs, batches of {BATCH}, everyone in every round. Step size and penalty of each "
        f"method are chosen on validation rows from the grid {GRID} by successive halving; accuracies are on the clients' test "
        f"rows, mean ± deviation over {SEEDS} seeds. {10 * PUBLIC} rows are public and unlabelled (FedDF uses them). A "
        f"round of L2GD and AL2SGD is one iteration; they are given {STEPS} times as many rounds. "
        "FedBN needs a batch norm: it is trained on the MLP with one, beside Local and FedAvg on the same.\n\n"
        f"Wanted: a personalised method is at least as good as the better of Local ({means['Local']:.4f}) and FedAvg "
        f"({means['FedAvg']:.4f}), less one point. Where one is not, "
        "the reason was looked into afterwards, with two seeds each and read on test rows: those figures explain, "
        "they are not tuned.\n\n"
        "| method | chosen settings | personal accuracy | shared model | held |\n|---|---|---|---|---|\n"
        + "\n".join(row(label, list(runs[label]), bars[label == "FedBN" or "batch norm" in label]) for label in ranked)
        + "\n"
    )
    (Path(__file__).parents[1] / "docs" / "results" / "methods.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
