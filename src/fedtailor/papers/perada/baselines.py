"""Every baseline of Tables 1 and 2 on CIFAR-10: personal models, and shared ones."""

from __future__ import annotations

from typing import Any

import fedtailor as ft
from fedtailor.papers.adapters import CIFAR, OURS, PLAIN, above, distilled, experiment, gap, over_best
from fedtailor.papers.base import Claim, Rows, Settings, column, one
from fedtailor.papers.frozen_images import Way, input_layer

ALONE, MTL, TUNED, PFEDME, APFL, DITTO = "Standalone", "MTL", "FedAvg+FT", "pFedMe", "APFL", "Ditto"
FULL = (ALONE, MTL, TUNED, PFEDME, APFL, DITTO)
PARTIAL = ("FedBN", "FedAlt, input", "FedSim, input", "LG-FedAvg", "FedRep", "FedAlt, output", "FedSim, output",
           "FedAlt, adapter", "FedSim, adapter")  # fmt: skip
GENERIC = ("FedAvg", "FedProx", "FedDyn", "FedDF")
SHARED = (*GENERIC, PFEDME, APFL, DITTO)  # Table 2's rivals


def ways(settings: Settings) -> dict[str, Way]:
    """Nothing is tuned for a method of its own: one step size for all."""
    work: dict[str, Any] = {"lr": settings["lr"], "epochs": settings["epochs"]}
    kd = {name: settings[name] for name in ("kd_steps", "kd_batch", "kd_lr")}
    first = input_layer(settings)
    inner = {"lam": 1.0, "lr": 0.5, "inner_lr": settings["lr"], "inner_steps": 3, "epochs": settings["epochs"]}
    full: dict[str, ft.Algorithm] = {
        ALONE: ft.Local(**work),
        MTL: ft.MTL(**work),
        TUNED: ft.FedAvgFT(finetune_epochs=settings["epochs"], **work),
        PFEDME: ft.PFedMe(**inner),
        APFL: ft.APFL(**work),
        DITTO: ft.Ditto(lam=1.0, **work),
        "FedBN": ft.FedBN(**work),
        "FedAlt, input": ft.FedAlt(personal=first, **work),
        "FedSim, input": ft.FedSim(personal=first, **work),
        "LG-FedAvg": ft.LGFedAvg(**work),
        "FedRep": ft.FedRep(personal_epochs=settings["epochs"], **work),
        "FedAlt, output": ft.FedAlt(**work),
        "FedSim, output": ft.FedSim(**work),
        "FedAvg": ft.FedAvg(**work),
        "FedProx": ft.FedProx(**work),
        "FedDyn": ft.FedDyn(**work),
        "FedDF": ft.FedDF(**kd, **work),
    }
    return {
        OURS: Way(distilled(settings, settings["lr"])),
        PLAIN: Way(distilled(settings, settings["lr"], kd_steps=0)),
        **{label: Way(method, "full") for label, method in full.items()},
        "FedAlt, adapter": Way(ft.FedAlt(personal="adapter", **work), "both"),
        "FedSim, adapter": Way(ft.FedSim(personal="adapter", **work), "both"),
    }


def best(rows: Rows, key: str, labels: tuple[str, ...]) -> float:
    return max(one(rows, key, method=label) for label in labels)


def fewest(rows: Rows) -> float:
    """PerAda's trained parameters over the least of all others'."""
    others = [row["trained"] for row in rows if row["method"] not in (OURS, PLAIN)]
    return float(column(rows, "trained", method=OURS)[0] / min(others))


def over(words: str, key: str, label: str, rivals: tuple[str, ...], theirs: str, limit: float = 0.0) -> Claim:
    return Claim(words, lambda rows: over_best(rows, key, label, rivals), above=limit, must=False, theirs=theirs)


RIVALS = (*FULL, *PARTIAL)
CLAIMS = (
    over("Local-test: PerAda above every baseline", "local", OURS, RIVALS, "+1.08 points"),
    over("Local-test: PerAda without KD above every baseline", "local", PLAIN, RIVALS, "+0.53 points"),
    over("Global-test: PerAda above every baseline", "global", OURS, RIVALS, "+5.23 points"),
    over("Global-test: PerAda without KD within half a point of every baseline", "global", PLAIN, RIVALS, "-0.01 points", -0.005),
    over("Corrupted test: PerAda above every baseline", "corrupted", OURS, RIVALS, "+4.21 points"),
    above("Local-test: distillation costs at most half a point", "local", OURS, PLAIN, -0.005, "+0.55 points"),
    above("Global-test: distillation helps", "global", OURS, PLAIN, theirs="+5.24 points"),
    above("Corrupted test: distillation helps", "corrupted", OURS, PLAIN, theirs="+4.08 points"),
    Claim("Global-test: Ditto is above every partial method", lambda rows: over_best(rows, "global", DITTO, PARTIAL), above=0.0,
          must=False, theirs="+10.6 points"),
    above("Global-test: FedAvg+FT is above standing alone", "global", TUNED, ALONE, theirs="+14.2 points"),
    Claim("Local-test: some method that shares is above standing alone",
          lambda rows: best(rows, "local", (*FULL[1:], *PARTIAL)) - one(rows, "local", method=ALONE), above=0.0, must=False,
          theirs="+4.8 points"),
    above("Global-test: FedAlt with a personal output layer is above one with the input layer", "global", "FedAlt, output",
          "FedAlt, input", theirs="+8.5 points"),
    Claim("PerAda trains the fewest parameters (share of the next)", fewest, below=1.0, must=False, theirs="0.25"),
    over("Shared model, Global-test: PerAda above every baseline", "union", OURS, SHARED, "+1.94 points"),
    over("Shared model, corrupted test: PerAda above every baseline", "union_corrupted", OURS, SHARED, "+3.24 points"),
    above("Shared model, Global-test: distillation helps PerAda", "union", OURS, PLAIN, theirs="+2.55 points"),
    above("Shared model, Global-test: distillation helps the full model (FedDF over FedAvg)", "union", "FedDF", "FedAvg",
          theirs="+5.49 points"),
    Claim("Shared model, Global-test: adapters without KD are above the full model (FedAvg)",
          lambda rows: gap(rows, "union", PLAIN, "FedAvg"), above=0.0, must=False, theirs="+4.88 points"),
)  # fmt: skip
EXPERIMENT = experiment(
    "CIFAR-10, every baseline",
    "Tables 1 and 2",
    {**CIFAR, "images": 3000, "rounds": 10, "lrs": {}},
    ways,
    CLAIMS,
)
