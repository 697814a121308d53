"""One thing changed of Flow at a time, on rows of two kinds: routing, regulariser, orders, splits, what w learns from."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtailor as ft
from fedtailor.papers.base import Claim, Experiment, Figure, Pieces, Rows, Settings, one
from fedtailor.papers.fair_routing import answers

FLOW, PI, PC, BARE, SOFT = "Flow", "PI-Flow", "PC-Flow (FedAvgFT)", "no regulariser", "soft inference"
OWN, EASED, LOCAL_HEAVY = "w by its own risk", "eased", "three quarters for v"
FIXED = (0.25, 0.5, 0.75, 1.0)
WAYS: dict[str, dict[str, Any]] = {
    FLOW: {},
    PI: {"variant": "pi"},
    PC: {"variant": "pc"},
    BARE: {"gamma": 0.0},
    SOFT: {"inference": "soft"},
    **{f"q0 = {q0:g}": {"q0": q0} for q0 in FIXED},
    "router first": {"order": "router-first"},
    "w first": {"order": "global-first"},
    LOCAL_HEAVY: {"split": 0.75},
    "a quarter for v": {"split": 0.25},
    "whole models": {"routing": "model"},
    OWN: {"global_risk": "own"},
    "v of all rows to predict": {"deploy_rows": "whole"},
    "router as received": {"deploy": "local"},
    "half the rounds FedAvg first": {"warmup": None},
    "rows parted anew in every round": {"redraw": True},
    EASED: {"variant": "eased", "redraw": True},
    "eased, soft inference": {"variant": "eased", "redraw": True, "inference": "soft"},
}


def measure(settings: Settings, seed: int, name: str) -> list[dict[str, Any]]:
    """Return a variant's accuracy: of personal models, on rows of each kind, and of the shared model."""
    federation = ft.Federation.load("instances", clients=settings["clients"], seed=seed, **settings["law"])
    change = {"warmup": settings["rounds"] // 2} if WAYS[name] == {"warmup": None} else WAYS[name]
    work = {key: settings[key] for key in ("lr", "local_epochs", "router_lr")}
    how: dict[str, Any] = {"batch_size": 20, "evaluate_every": 0, "engine": "vectorized", "weights": "size", "seed": seed}
    run = ft.run(ft.Flow(**{**work, **change}), federation, settings["model"], rounds=settings["rounds"], **how)
    right, kinds = np.concatenate(answers(run)), federation.test.kinds
    assert kinds is not None
    common = kinds.numpy().astype(bool)
    kind = {"common": float(right[common].mean()), "own": float(right[~common].mean())}
    return [{"variant": name, "personal": run.summary["acc_personal"], "shared": run.summary["acc_global"], **kind}]


def over(rows: Rows, label: str, key: str = "personal", of: str = FLOW) -> float:
    """Return how far Flow, or another variant, is above one."""
    return one(rows, key, variant=of) - one(rows, key, variant=label)


LAPTOP = {
    **{"clients": 20, "law": {"share": 0.5, "rows": 60, "visible": 4.0, "test_rows": 300}, "model": "mlp:32"},
    **{"rounds": 60, "lr": 0.3, "local_epochs": 20, "router_lr": 1.0},
}
EXPERIMENT = Experiment(
    "Flow, one thing changed",
    "Section 5.2, Figure 4, Appendix D",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "clients": 300, "rounds": 1500}},
    Pieces(lambda settings: list(WAYS), measure),
    Figure("shared", "personal", "variant", "accuracy of the shared model", "accuracy of the personal models"),
    (
        Claim("Flow is above PI-Flow", lambda rows: over(rows, PI), above=0.0, must=False, theirs="+3.2 points, Stackoverflow"),
        Claim("Flow is above PC-Flow", lambda rows: over(rows, PC), above=0.0, must=False, theirs="+5.1 points, Stackoverflow"),
        Claim("The regulariser lifts the personal models", lambda rows: over(rows, BARE), above=0.0, must=False,
              theirs="+1.9 points, Stackoverflow"),
        Claim("The regulariser lifts the shared model", lambda rows: over(rows, BARE, "shared"), above=0.0, must=False,
              theirs="+2.5 points, Stackoverflow"),
        Claim("Routing is above every fixed q0 (least)", lambda rows: min(over(rows, f"q0 = {q0:g}") for q0 in FIXED), above=0.0,
              must=False, theirs="above 0"),
        Claim("Hard and soft inference are alike (distance)", lambda rows: abs(over(rows, SOFT)), below=0.01, must=False,
              theirs="0.08 points, Stackoverflow"),
        Claim("Three quarters of the rows for v leave the shared model behind", lambda rows: over(rows, LOCAL_HEAVY, "shared"),
              above=0.0, must=False, theirs="above 0"),
        Claim("And the personal models", lambda rows: over(rows, LOCAL_HEAVY), above=0.0, must=False, theirs="above 0"),
        Claim("By its own risk the shared model is better than by Eq. (5)", lambda rows: over(rows, FLOW, "shared", OWN),
              above=0.0, must=False),
        Claim("The eased Flow is above PC-Flow", lambda rows: over(rows, PC, of=EASED), above=0.0, must=False),
        Claim("The eased Flow is above Flow as printed", lambda rows: over(rows, FLOW, of=EASED), above=0.0, must=False),
    ),
    convex=False,
)  # fmt: skip
