"""A hundred and a thousand clients, a tenth of them in a round, over the heterogeneity R."""

from __future__ import annotations

from typing import Any

import torch

import fedtailor as ft
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, by_value, one

LAMS = (0.02, 0.1, 0.5)
SEEN = 100  # clients whose error is looked at


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return the mean squared distance of the models of a hundred clients to the truth, after some rounds."""
    out: list[dict[str, Any]] = []
    for clients in settings["clients"]:
        for R in settings["R"]:
            design = {name: settings[name] for name in ("rows", "d", "separate")}
            federation = ft.Federation.load("clup-logistic", clients=clients, **design, R=R, seed=seed)
            assert federation.truth is not None
            truth = torch.stack([model["weight"] for model in federation.truth[:SEEN]])
            for lam in LAMS:
                label = {"panel": f"{clients} clients, R = {R:g}", "clients": clients, "R": R, "method": f"lam = {lam:g}"}

                def look(now: Any, truth: Any = truth, label: Any = label) -> None:
                    rounds = now.record["round"] + 1
                    if rounds in settings["looks"]:
                        models = torch.stack([now.personal(i)["model"]["weight"] for i in range(SEEN)])
                        error = float(((models - truth) ** 2).flatten(1).sum(1).mean())
                        out.append({**label, "round": rounds, "error": error})

                lr = settings["lr"]
                method = ft.FedCLUP(lam=lam, lr=lr / (1 + lam * lr), steps=settings["steps"])
                options: dict[str, Any] = {"bias": False, "evaluate_every": 0, "engine": "vectorized", "cohort": clients // 10}
                ft.run(method, federation, rounds=max(settings["looks"]), callbacks=[look], seed=seed, **options)
    return out


def ratio(rows: Rows, R: float, look: int, a: float, b: float) -> float:
    """Return the error of one lam over that of another, at an R and a look, least over the numbers of clients."""
    where = {"R": R, "round": sorted({row["round"] for row in rows})[look]}
    return min(
        one(rows, "error", clients=m, method=f"lam = {a:g}", **where)
        / one(rows, "error", clients=m, method=f"lam = {b:g}", **where)
        for m in {row["clients"] for row in rows}
    )


def most(rows: Rows) -> float:
    return max(row["R"] for row in rows)


LAPTOP = {
    **{"clients": [100, 1000], "rows": 200, "d": 10, "separate": False, "R": [0.0, 3.0], "lr": 1.0, "steps": 4},
    **{"looks": [10, 20, 40, 80, 160, 320]},
}
EXPERIMENT = Experiment(
    "Error over rounds, 100 and 1,000 clients",
    "Figure 6",
    {"laptop": LAPTOP, "paper": {**LAPTOP, "separate": True, "R": [0.0, 1.0, 2.0, 3.0], "steps": 50}},
    by_value("clients", measure),
    Figure("round", "error", "method", "rounds", "squared distance to the truth", log_x=True, log_y=True, panel="panel"),
    (
        Claim("Where clients differ the smallest lam is ahead early (error of the largest over its own, least)",
              lambda rows: ratio(rows, most(rows), 0, LAMS[-1], LAMS[0]), above=1.0, must=False),
        Claim("It still is in the end (error of the largest over its own, least)",
              lambda rows: ratio(rows, most(rows), -1, LAMS[-1], LAMS[0]), above=1.0, must=False),
        Claim("Where clients are alike the largest lam is ahead in the end (error of the smallest over its own, least)",
              lambda rows: ratio(rows, 0.0, -1, LAMS[0], LAMS[-1]), above=1.0, must=False),
    ),
    convex=False,  # convex, but too long for `papers check`
)  # fmt: skip
