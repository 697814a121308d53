"""``make bench-perada``: how long a round of PerAda on a frozen backbone takes, against Ditto with the full model, in the same
process and minute; docs/results/perada-speed.md.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from benchmarks.kept import keep, kept
from fedtailor.engine.setup import build_task
from fedtailor.papers.frozen_images import federation
from fedtailor.server.distill import distill, outputs

BATCH = 64
KD: dict[str, int] = {"kd_steps": 50, "kd_batch": 64}
DATA: dict[str, Any] = {"set": "cifar10", "images": 640, "partition": "iid", "clients": 4, "public": 1000}
WANTED, TWICE = 0.75, 2.0
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
    " Teachers answer, and a step of the student is taken, on all cores."
)


def costs(federation: ft.Federation, adapters: str) -> dict[str, float]:
    """Return CPU milliseconds, on one core, of a row of a teacher and of a row in a step of the student."""
    task, cores = build_task(adapters, federation, 0, torch.float32, bias=True), os.sched_getaffinity(0)
    x, threads = task.public[:256], torch.get_num_threads()
    index = np.arange(3 * KD["kd_batch"]).reshape(3, -1)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(cores)})
    try:
        marks = [time.process_time()]
        target = outputs(task, task.init(), x).softmax(-1)
        marks.append(time.process_time())
        distill(task, task.init(), x, target, index, lr=1e-3)
        marks.append(time.process_time())
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
    return {"teacher": 1e3 * (marks[1] - marks[0]) / len(x), "student": 1e3 * (marks[2] - marks[1]) / index.size}


def least(mine: Mapping[str, Mapping[str, float]], label: str) -> str:
    """Say how long a round with KD would take if the server's work were shared out over all cores with nothing lost."""
    ditto, plain, teacher, student = (
        float(np.median([m[key] for m in mine.values()])) for key in ("ditto", "perada", "teacher", "student")
    )
    answers, steps = (DATA["clients"] + 2) * DATA["public"] * teacher / 1e3, KD["kd_steps"] * KD["kd_batch"] * student / 1e3
    cores = os.cpu_count() or 1
    whole = (plain + (answers + steps) / cores) / ditto
    measured = ratio(mine, "perada_kd")
    return (
        f"{label} with KD: at most {TWICE:g} times Ditto's round is asked for: {'held' if measured <= TWICE else '**not held**'} "
        f"({measured:.2f}). A row of a teacher takes {teacher:.2f} ms of one core, one in a student's step {student:.2f} ms. "
        f"In a round that is {answers:.1f} s for what {DATA['clients']} teachers and the student before and after say, and "
        f"{steps:.1f} s for the student's steps. Shared out over {cores} cores with nothing lost, beside the clients' "
        f"{plain:.2f} s, a round would be {whole:.1f} times Ditto's, and {(plain + answers / cores) / ditto:.1f} times without "
        "a step of the student."
    )


def page(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    said = [f"- {claim}: {'held' if held else '**not held**'} ({how})" for claim, held, how in claims(found)]
    limits = [f"- {least(mine, label)}" for label, mine in found.items() if all("teacher" in m for m in mine.values())]
    return "\n".join(["# Time of PerAda's rounds", "", ABOUT, "", *table(found), "", *said, *limits, ""])


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--times", type=int, default=3)
    flags.add_argument("--network", action="append", choices=NETWORKS, help="measure this one only; the others' figures are kept")
    asked = flags.parse_args()
    data, found = federation(DATA, 0), kept("perada-speed")
    for label in asked.network or NETWORKS:
        full, adapters = NETWORKS[label]
        mine = {}
        for go in range(asked.times):
            mine[str(go)] = {**compared(data, full, adapters, BATCH, KD), **costs(data, adapters)}
            print(label, mine[str(go)], flush=True)
        found = keep("perada-speed", label, mine)
    page_of = {label: found[label] for label in NETWORKS if label in found}
    (Path(__file__).parents[1] / "docs" / "results" / "perada-speed.md").write_text(page(page_of), encoding="utf-8")


if __name__ == "__main__":
    main()
