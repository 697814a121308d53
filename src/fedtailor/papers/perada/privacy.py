"""PerAda and Ditto with the full model under noise, a ResNet-8 with group norm."""

from __future__ import annotations

from dataclasses import replace

import fedtailor as ft
from fedtailor.papers.adapters import CIFAR, SMALL, above, distilled, experiment, rate
from fedtailor.papers.base import Settings
from fedtailor.papers.frozen_images import Way

NOISES = {"not private": None, "noise 0.5": 0.5, "noise 1": 1.0, "noise 2": 2.0}
THEIRS = {"not private": "98.08, 98.59", "noise 0.5": "80.33, 76.76", "noise 1": "79.79, 76.75", "noise 2": "77.83, 76.67"}
NETWORK = {"network": f"{SMALL},group", "start": "pooled"}


def ways(settings: Settings) -> dict[str, Way]:
    out = {}
    for level, noise in NOISES.items():
        ours, ditto = f"PerAda, {level}", f"Ditto, full, {level}"
        methods = {
            ours: distilled(settings, rate(settings, ours)),
            ditto: ft.Ditto(lam=1.0, lr=rate(settings, ditto), epochs=settings["epochs"]),
        }
        for label, method in methods.items():
            noisy = method if noise is None else replace(method, opt=ft.Private(noise=noise))
            out[label] = Way(noisy, "adapters" if label == ours else "full", NETWORK)
    return out


CLAIMS = tuple(
    above(f"{title}, {level}: PerAda above Ditto", key, f"PerAda, {level}", f"Ditto, full, {level}",
          theirs=f"{THEIRS[level]} (its own noises)" if key == "local" else None)
    for level in NOISES
    for title, key in (("Local-test", "local"), ("Global-test", "global"))
)  # fmt: skip
CHOSEN = {  # on validation rows: without noise, and at noise 1 for every noise
    **{f"{label}, not private": 0.03 for label in ("PerAda", "Ditto, full")},
    **{f"PerAda, {level}": 0.3 for level in NOISES if level != "not private"},
}
EXPERIMENT = experiment(
    "PerAda and Ditto under noise",
    "Table 4",
    {**CIFAR, "shift": False, "lrs": CHOSEN, "start_images": 50_000, "start_epochs": 6},
    ways,
    CLAIMS,
    full={"cohort": 1.0, "start_epochs": 20},
    means_of=3,
)
