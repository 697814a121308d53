"""Where routing by instance pays: generated federations with two kinds of rows, Flow beside FedAvgFT, Ditto and APFL.

Step sizes, epochs and lam / alpha of every method are chosen on validation rows by the same search. ``cells`` is the map over the
share of common rows, rows per client and how visible a row's kind is; ``trials`` changes one thing at a time in Flow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.data.split import Split
from fedtailor.runs.history import Run

MODEL, CLIENTS, ROUNDS, BATCH = "mlp:32", 20, 60, 20
SHARES, ROWS, VISIBLE = (0.25, 0.5, 0.75), (30, 60, 120), (0.0, 2.0, 4.0)
GRID = {"lr": [0.1, 0.3], "finetune_epochs": [5, 20], "local_epochs": [5, 20], "lam": [0.03, 0.3], "alpha": [0.25, 0.5, 0.75]}
EASED: dict[str, Any] = {"global_risk": "own", "inference": "soft", "deploy_rows": "whole", "redraw": True}
TOLD = "kinds told: FedAvg of common rows, Local of own"
FIRST = 10  # seed of the map's federations: the trials, by which EASED was chosen, have 0, 1, 2
METHODS: dict[str, ft.Algorithm] = {
    "FedAvg": ft.FedAvg(lr=0.3),
    "FedAvgFT": ft.FedAvgFT(lr=0.3, finetune_epochs=5),
    "Ditto": ft.Ditto(lr=0.3, lam=0.3, personal_epochs=5),
    "APFL": ft.APFL(lr=0.3, alpha=0.5),
    "Flow": ft.Flow(lr=0.3, local_epochs=5, router_lr=1.0),
    "Flow, eased": ft.Flow(lr=0.3, local_epochs=5, router_lr=1.0, deploy_epochs=10, **EASED),
}
MIDDLE = {"share": 0.5, "rows": 60, "visible": 4.0}
RIVALS = ("FedAvg", "FedAvgFT", "Ditto", "APFL")
# one change at a time from the paper's Flow, then from the eased one
BASE: dict[str, Any] = {"lr": 0.3, "local_epochs": 20, "router_lr": 1.0}
TRIALS: dict[str, dict[str, Any]] = {
    "as in the paper": {},
    "whole models": {"routing": "model"},
    "soft inference": {"inference": "soft"},
    "w learns from its own risk": {"global_risk": "own"},
    "v of all rows to predict": {"deploy_rows": "whole"},
    "router as received": {"deploy": "local"},
    "router ten epochs at the end": {"deploy_epochs": 10},
    "all adapts at the end": {"deploy": "all"},
    "no regulariser": {"gamma": 0.0},
    "gamma 0.01": {"gamma": 0.01},
    "three quarters for v": {"split": 0.75},
    "a quarter for v": {"split": 0.25},
    "half the rounds FedAvg first": {"warmup": ROUNDS // 2},
    "rows parted anew in every round": {"redraw": True},
    "eased": {**EASED, "deploy_epochs": 10},
    "eased, hard inference": {**EASED, "inference": "hard", "deploy_epochs": 10},
    "eased, mixed risk": {**EASED, "global_risk": "mixed", "deploy_epochs": 10},
    "eased, v of its half": {**EASED, "deploy_rows": "part", "deploy_epochs": 10},
    "eased, whole models": {**EASED, "routing": "model", "deploy_epochs": 10},
    "eased, router as received": {**EASED, "deploy": "local"},
    "eased, rows parted once": {**EASED, "redraw": False, "deploy_epochs": 10},
    "eased, half the rounds FedAvg first": {**EASED, "warmup": ROUNDS // 2, "deploy_epochs": 10},
    "eased, gamma 0.01": {**EASED, "gamma": 0.01, "deploy_epochs": 10},
    "eased, a quarter for v": {**EASED, "split": 0.25, "deploy_epochs": 10},
    "eased, all adapts at the end": {**EASED, "deploy": "all", "deploy_epochs": 10},
    "eased, 5 epochs for v": {**EASED, "local_epochs": 5, "deploy_epochs": 10},
}


def cells() -> dict[str, dict[str, Any]]:
    """The map, its middle first."""
    found = [
        (abs(np.log(rows / 60)) + abs(share - 0.5) - visible / 10, share, rows, visible)
        for share in SHARES
        for rows in ROWS
        for visible in VISIBLE
    ]
    return {
        f"share {share:g}, {rows} rows, visible {visible:g}": {"share": share, "rows": rows, "visible": visible}
        for _, share, rows, visible in sorted(found)
    }


def federation(cell: Mapping[str, Any], seed: int, test_rows: int = 300) -> ft.Federation:
    fed = ft.Federation.load("instances", clients=CLIENTS, seed=seed, test_rows=test_rows, **cell)
    return fed.to(torch.float32)


def facts(run: Run) -> dict[str, Any]:
    """Accuracy over all rows, over those of each kind, and how well the routes tell the kinds apart."""
    kinds, right = run.federation.test.kinds, np.empty(0)
    if kinds is not None:
        ids = np.arange(len(run.federation))
        found = {}
        for part in run.engine.predictions(run.shared, ids, run.store, run.federation.test):  # type: ignore[attr-defined]
            found |= {int(i): (own.argmax(-1) == y).numpy() for i, own, y in zip(part.ids, part.personal, part.y, strict=True)}
        right = np.concatenate([found[i] for i in range(len(ids))])
    out = {"personal": run.summary["acc_personal"], "shared": run.summary["acc_global"], "settings": run.summary["settings"]}
    if kinds is not None:
        out |= {"common": float(right[kinds.numpy()].mean()), "own": float(right[~kinds.numpy()].mean())}
    if routing := run.summary.get("routing"):
        out |= {"auc": routing.get("kind_auc"), "q": routing["mean"]}
    return out


def cell(
    what: Mapping[str, Any], seed: int, rounds: int = ROUNDS, methods: Mapping[str, ft.Algorithm] = METHODS
) -> dict[str, Any]:
    """Every method on one federation of the map, tuned on its validation rows."""
    found = ft.compare(
        methods,
        federation(what, seed),
        MODEL,
        rounds=rounds,
        seed=seed,
        tune=GRID,
        batch_size=BATCH,
        engine="vectorized",
        evaluate_every=0,
    )
    return {label: facts(run) for label, run in found.items()}


def trial(options: Mapping[str, Any], seed: int, rounds: int = ROUNDS, what: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One change in Flow (or FedAvgFT, where there is none to route), not tuned, in the middle of the map."""
    fed = federation(what or MIDDLE, seed)
    method = ft.FedAvgFT(lr=0.3, finetune_epochs=20) if options.get("finetune") else ft.Flow(**{**BASE, **options})
    return facts(ft.run(method, fed, MODEL, rounds=rounds, seed=seed, batch_size=BATCH, engine="vectorized", evaluate_every=0))


def told(seed: int, rounds: int = ROUNDS, what: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Were the kinds known: FedAvg of the common rows alone, and each client's own model of its own rows alone."""
    fed = federation(what or MIDDLE, seed)
    same = {"rounds": rounds, "seed": seed, "batch_size": BATCH, "engine": "vectorized", "evaluate_every": 0}
    common = ft.run(ft.FedAvg(lr=0.3), _of_kind(fed, True), MODEL, **same)  # type: ignore[arg-type]
    own = ft.run(ft.Local(lr=0.3), _of_kind(fed, False), MODEL, **same)  # type: ignore[arg-type]
    kinds = fed.test.kinds
    assert kinds is not None
    share, right = float(kinds.float().mean()), (common.summary["acc_global"], own.summary["acc_personal"])
    return {
        "personal": share * right[0] + (1 - share) * right[1],
        "common": right[0],
        "own": right[1],
        "shared": float("nan"),
        "settings": "",
    }


def _of_kind(fed: ft.Federation, common: bool) -> ft.Federation:
    """The rows of one kind."""

    def part(split: Split, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = split.client(i)
        assert split.kinds is not None
        kept = split.kinds[split.offsets[i] : split.offsets[i + 1]].bool() == common
        return x[kept], y[kept]

    each = [[part(split, i) for i in range(len(fed))] for split in (fed.train, fed.test)]
    return ft.Federation.from_arrays(each[0], each[1], classes=fed.classes)


# -- what is written ------------------------------------------------------------------------------------------------------
def table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The map: {cell: {seed: {method: facts}}} as lines of Markdown."""
    lines = [
        f"| cell | seeds | {' | '.join(METHODS)} | eased Flow less its best rival | AUC of q by layer (Flow; eased) |",
        f"|---|---|{'---|' * (len(METHODS) + 2)}",
    ]
    pays = []
    for name in cells():
        if name not in found:
            continue
        seeds = list(found[name].values())
        mean = {label: float(np.mean([s[label]["personal"] for s in seeds])) for label in METHODS}
        gains = [s["Flow, eased"]["personal"] - max(s[r]["personal"] for r in RIVALS) for s in seeds]
        area = "; ".join(", ".join(f"{a:.2f}" for a in np.mean([s[m]["auc"] for s in seeds], 0)) for m in ("Flow", "Flow, eased"))
        spread = f" ± {np.std(gains):.3f}" if len(gains) > 1 else ""
        numbers = " | ".join(f"{mean[label]:.3f}" for label in METHODS)
        lines.append(f"| {name} | {len(seeds)} | {numbers} | {np.mean(gains):+.3f}{spread} | {area} |")
        pays.append(
            (
                name,
                float(np.mean(gains)),
                float(np.mean([s["Flow"]["personal"] - max(s[r]["personal"] for r in RIVALS) for s in seeds])),
            )
        )
    if pays:
        good, paper = ([name for name, *g in pays if g[k] > 0.005] for k in (0, 1))
        lines += [
            "",
            f"Flow as in the paper is more than half a point above its best tuned rival in {len(paper)} of {len(pays)} cells"
            f"{': ' + '; '.join(paper) if paper else ''}. The eased one in {len(good)}{': ' + '; '.join(good) if good else ''}.",
        ]
    return lines


def trials_table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    lines = [
        "| Flow | seeds | personal | on common rows | on own rows | shared model | AUC of q by layer |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in [TOLD, "FedAvgFT, 20 epochs", *TRIALS]:
        if name in found:
            seeds = list(found[name].values())
            means = [float(np.mean([s[k] for s in seeds])) for k in ("personal", "common", "own", "shared")]
            numbers = " | ".join("-" if np.isnan(mean) else f"{mean:.3f}" for mean in means)
            area = ", ".join(f"{a:.2f}" for a in np.mean([s["auc"] for s in seeds], 0)) if "auc" in seeds[0] else "-"
            lines.append(f"| {name} | {len(seeds)} | {numbers} | {area} |")
    return lines
