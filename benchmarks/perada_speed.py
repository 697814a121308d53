"""``make bench-perada``: how long a round of PerAda on a frozen backbone takes, against Ditto with the full model, in the same
process and minute; docs/results/perada-speed.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fedtailor as ft
from fedtailor.papers.frozen_images import federation

BATCH = 64
KD = {"kd_steps": 50, "kd_batch": 64}
DATA = {"set": "cifar10", "images": 640, "partition": "iid", "clients": 4, "public": 1000}
WANTED = 0.75
ROUNDS = 4  # the first is not counted: workers start, layers are laid out
# full network, with adapters
NETWORKS = {
    "ResNet-8": ("resnet8", "resnet8:adapters,dropout=0"),
    "ResNet-8, adapters in the last block": ("resnet8", "resnet8:adapters,dropout=0,last=1"),
    "ResNet-18": ("resnet18", "resnet18:adapters,dropout=0"),
    "ResNet-18, adapters in the last 4 of 8 blocks": ("resnet18", "resnet18:adapters,dropout=0,last=4"),
    "EfficientNet-Lite0, 64 px": ("effnet-lite0:size=64,dropout=0", "effnet-lite0:adapters,size=64,dropout=0"),
    "EfficientNet-Lite0, 64 px, adapters in the last 8 of 16 blocks": (
        "effnet-lite0:size=64,dropout=0",
        "effnet-lite0:adapters,size=64,dropout=0,last=8",
    ),
}


def rounds(method: ft.Algorithm, federation: ft.Federation, model: str, batch: int) -> list[float]:
    """Seconds of each round but the first."""
    run = ft.run(method, federation, model, rounds=ROUNDS, batch_size=batch, engine="loop", evaluate_every=0)
    return [float(r["seconds"]) for r in run.history[1:]]


def compared(federation: ft.Federation, full: str, adapters: str, batch: int, kd: Mapping[str, Any]) -> dict[str, float]:
    """Median seconds of a round of Ditto with the full model, of PerAda without and with distillation."""
    work: dict[str, Any] = {"lr": 0.01, "epochs": 1}
    found = {
        "ditto": rounds(ft.Ditto(**work), federation, full, batch),
        "perada": rounds(ft.PerAda(kd_steps=0, **work), federation, adapters, batch),
        "perada_kd": rounds(ft.PerAda(**kd, **work), federation, adapters, batch),
    }
    return {name: float(np.median(seconds)) for name, seconds in found.items()}


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """A row for each network: the median over keys."""
    head = ["network", "times", "Ditto, full: s", "PerAda without KD: s", "ratio", "PerAda with KD: s", "ratio"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for label, mine in found.items():
        ditto, plain, kd = (float(np.median([m[key] for m in mine.values()])) for key in ("ditto", "perada", "perada_kd"))
        first, second = ratio(mine, "perada"), ratio(mine, "perada_kd")
        cells = [label, str(len(mine)), f"{ditto:.2f}", f"{plain:.2f}", f"{first:.2f}", f"{kd:.2f}", f"{second:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def claims(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[tuple[str, bool, str]]:
    """(claim, whether the median ratio holds it, the ratio) of each network."""
    return [
        (f"{label}: a round {how} KD takes at most {WANTED:g} of Ditto's", ratio(mine, key) <= WANTED, f"{ratio(mine, key):.2f}")
        for how, key in (("without", "perada"), ("with", "perada_kd"))
        for label, mine in found.items()
    ]


def ratio(mine: Mapping[str, Mapping[str, float]], key: str) -> float:
    return float(np.median([m[key] / m["ditto"] for m in mine.values()]))


ABOUT = (
    "Written by `make bench-perada` (benchmarks/perada_speed.py). A round of four clients with 96 training images of CIFAR-10 "
    "each, one epoch, two workers; median of three rounds, and over times. The frozen layers before the first adapter are "
    f"computed once, before the rounds; with KD the server also takes {KD['kd_steps']} steps in batches of {KD['kd_batch']} and "
    "asks every client's model about 1,000 public images, which has no counterpart in Ditto and does not shrink with the "
    "clients' rows."
    " In CPU time on one thread ResNet-18 takes 9.5 ms for a row of Ditto (both branches), 6.1 ms for one of PerAda's"
    " clients, 0.90 ms for a row of a teacher and 2.8 ms for one in a step of the student. Put together, a round is"
    " 2.3 s of clients, 3.6 s of teachers, 9.0 s of student and 1.8 s of outputs before and after (they are measured),"
    " where Ditto takes 3.6 s: 4.6 times as much. Twice as much cannot be had with these settings: it would be 3.7"
    " times if a step of the student cost no more than two forward passes, and 2.1 times without a student. Every"
    " block has an adapter, so that only the first convolution gives the same for all teachers (it is computed once);"
    " to stack teachers saves no operation. What shortens it is fewer steps: 10 in the place of 50, by the same times"
    " per row, are 2.1 times Ditto's."
)


def page(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    said = [f"- {claim}: {'held' if held else '**not held**'} ({how})" for claim, held, how in claims(found)]
    return "\n".join(["# Time of PerAda's rounds", "", ABOUT, "", *table(found), "", *said, ""])


def main(times: int = 3) -> None:
    data = federation(DATA, 0)
    found: dict[str, dict[str, dict[str, float]]] = {label: {} for label in NETWORKS}
    for time in range(times):
        for label, (full, adapters) in NETWORKS.items():
            found[label][str(time)] = compared(data, full, adapters, BATCH, KD)
            print(label, found[label][str(time)], flush=True)
    (Path(__file__).parents[1] / "docs" / "results" / "perada-speed.md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
