"""How long a round of PerAda on a frozen backbone takes, against Ditto with the full model, in the same process and minute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import fedtailor as ft

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
