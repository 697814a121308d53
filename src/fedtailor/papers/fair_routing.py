"""A fair test of routing between a shared and a fine-tuned model: who is right, whom a router trusts, what an oracle would get.

All methods have the same rounds, rows and steps for w. The step sizes and epochs that settings name were chosen by ``tuned``, on
validation rows of a federation that is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata, t

import fedtailor as ft
from fedtailor.algorithms.flow_gate import evidence
from fedtailor.data.pool import dealt
from fedtailor.data.readers import images
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, one
from fedtailor.runs.history import Run

FEDAVG, TUNED, MEAN, STACK, KNN = "FedAvg", "FedAvgFT", "averaging", "stacking", "kNN-Per"
PAPER, HARD, SOFT, GATE, POOL = "Flow, paper", "Flow, eased", "Flow, eased, soft", "FlowGate", "FlowGate, pool"
ORACLE = "oracle"
METHODS = (FEDAVG, TUNED, MEAN, STACK, KNN, PAPER, HARD, SOFT, GATE, POOL, ORACLE)
TUNING_SEED = 100
GRID = {
    TUNED: {"lr": [0.1, 0.3], "finetune_lr": [0.1, 0.3]},
    PAPER: {"lr": [0.1, 0.3], "gamma": [0.001, 0.1]},
}
Right = list[NDArray[np.float64]]  # per client, 1 for every test row that is answered rightly


def load(settings: Settings, seed: int) -> ft.Federation:
    """Deal a federation of a set; a seed draws its rows and its clients anew."""
    if settings["set"] == "instances":
        return ft.Federation.load("instances", clients=settings["clients"], seed=seed, **settings["law"])
    flat = settings["model"].startswith("mlp")
    if settings["set"] == "mnist":
        return ft.Federation.load("mnist", partition="natural", clients=settings["clients"], seed=seed, flat=flat, **SHARES)
    pool = images.emnist(47)
    count = settings["clients"] * settings["rows"]
    kept = np.sort(np.random.default_rng(seed).permutation(len(pool.y))[:count])
    part = replace(pool, x=pool.x[kept], y=pool.y[kept])
    return dealt(part, settings["clients"], settings["partition"], seed=seed, flat=flat, **SHARES)


SHARES: dict[str, Any] = {"test_share": 0.3, "val_share": 0.2}


def options(settings: Settings, seed: int) -> dict[str, Any]:
    names = ("rounds", "cohort", "batch_size")
    fixed = {"evaluate_every": 0, "engine": "vectorized", "weights": "size", "seed": seed}
    return {**{name: settings[name] for name in names}, **fixed}


def tuned(settings: Settings) -> dict[str, dict[str, float]]:
    """Choose the settings of FedAvgFT and of the paper's Flow, on validation rows of a federation that is not measured."""
    methods: dict[str, ft.Algorithm] = {
        TUNED: ft.FedAvgFT(epochs=settings["epochs"], finetune_epochs=settings["tune_epochs"], finetune_lr=0.1),
        PAPER: ft.Flow(epochs=settings["epochs"], local_epochs=settings["tune_epochs"]),
    }
    fed, best = load(settings, TUNING_SEED), {}
    for label, method in methods.items():
        how = options(settings, TUNING_SEED)
        done = ft.compare({label: method}, fed, settings["model"], yardsticks=(), tune=GRID[label], **how)
        chosen = done.all[label][0].algorithm
        best[label] = {name: getattr(chosen, name) for name in GRID[label]}
    return best


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return a row per method: its accuracy, the mean over clients, and how far it is from the better of two yardsticks."""
    fed, best, how = load(settings, seed), settings["tuned"], options(settings, seed)
    two, work = best[TUNED], {"epochs": settings["epochs"], "finetune_epochs": settings["tune_epochs"]}
    runs = {
        GATE: ft.run(ft.FlowGate(**work, **two, warmup=settings["rounds"] // 2, combine="gate"), fed, settings["model"], **how),
        POOL: ft.run(ft.FlowGate(**work, **two, warmup=settings["rounds"] // 2, combine="pool"), fed, settings["model"], **how),
        STACK: ft.run(ft.FlowGate(**work, **two, combine="stack"), fed, settings["model"], **how),
        KNN: ft.run(ft.KNNPer(epochs=settings["epochs"], lr=two["lr"]), fed, settings["model"], **how),
        PAPER: ft.run(
            ft.Flow(epochs=settings["epochs"], local_epochs=settings["tune_epochs"], **best[PAPER]), fed, settings["model"], **how
        ),
        HARD: ft.run(eased(settings), fed, settings["model"], **how),
    }
    right = {label: answers(run) for label, run in runs.items()}
    gate, soft = runs[GATE], runs[HARD]
    right[MEAN] = answers(gate, replace(gate.algorithm, combine="average"))  # type: ignore[call-arg]
    right[SOFT] = answers(soft, replace(soft.algorithm, inference="soft"))  # type: ignore[call-arg]
    right[FEDAVG], right[TUNED] = of_two(gate)
    right[ORACLE] = [np.maximum(a, b) for a, b in zip(right[FEDAVG], right[TUNED], strict=True)]
    yardstick = max(TUNED, MEAN, key=lambda label: accuracy(right[label]).mean())
    told = {label: router(runs[label]) for label in (PAPER, HARD, GATE)}
    told[SOFT] = told[HARD]
    empty = {"auc": None, "calibration": None, "one_right": None}
    return [
        {
            "place": place,
            "method": label,
            "accuracy": float(accuracy(right[label]).mean()),
            "yardstick": yardstick,
            **paired(accuracy(right[label]) - accuracy(right[yardstick])),
            **told.get(label, empty),
        }
        for place, label in enumerate(METHODS, 1)
    ]


def eased(settings: Settings) -> ft.Flow:
    """The eased Flow with FedAvgFT's w and v."""
    two = settings["tuned"][TUNED]
    return ft.Flow(
        variant="eased",
        epochs=settings["epochs"],
        local_epochs=settings["tune_epochs"],
        lr=two["lr"],
        local_lr=two["finetune_lr"],
        redraw=True,
    )


@torch.no_grad()
def answers(run: Run, method: Any = None) -> Right:
    """Say of every test row of every client whether a method, with what a run trained, answers it rightly."""
    method, out = method or run.algorithm, []
    for i in range(len(run.federation)):
        x, y = run.federation.test.client(i)
        out.append((method.predict(run.task, run.shared, run.personal[i], x.float()).argmax(-1) == y).double().numpy())
    return out


@torch.no_grad()
def of_two(run: Run) -> tuple[Right, Right]:
    """The same for w and for v of a run."""
    both: tuple[Right, Right] = ([], [])
    for i in range(len(run.federation)):
        x, y = run.federation.test.client(i)
        for model, out in zip((run.shared["model"], run.personal[i]["local"]), both, strict=True):
            out.append((run.task.apply(model, x.float()).argmax(-1) == y).double().numpy())
    return both


@torch.no_grad()
def router(run: Run) -> dict[str, Any]:
    """Return how well a run's router tells who is right, on test rows where exactly one of w and v is: the area under its
    curve, how far its probabilities are from the shares (five bins), and how many rows these are."""
    chances, w_right = [], []
    for i, (a, b) in enumerate(zip(*of_two(run), strict=True)):
        x, only = run.federation.test.client(i)[0].float(), a != b
        method: Any = run.algorithm
        if isinstance(method, ft.FlowGate):
            two = (run.task.apply(m, x).softmax(-1) for m in (run.shared["model"], run.personal[i]["local"]))
            q = (evidence(*two) @ run.shared["gate"]).sigmoid()
        else:
            q = method.routes(run.task, run.shared, run.personal[i], x)[..., 0].mean(1)
        chances.append(q.numpy()[only])
        w_right.append(a[only])
    q, right = np.concatenate(chances), np.concatenate(w_right)
    return {"auc": area(q, right), "calibration": calibration(q, right), "one_right": len(q)}


def area(q: NDArray[np.float64], right: NDArray[np.float64]) -> float | None:
    """The area under the curve, by ranks; None where all are of one kind."""
    ones = int(right.sum())
    if not 0 < ones < len(q):
        return None
    return float((rankdata(q)[right > 0].sum() - ones * (ones + 1) / 2) / (ones * (len(q) - ones)))


def calibration(q: NDArray[np.float64], right: NDArray[np.float64], bins: int = 5) -> float | None:
    """The mean distance of q from the share of rows that w has right, in bins of as many rows each."""
    parts = [part for part in np.array_split(np.argsort(q, kind="stable"), bins) if len(part)]
    return float(sum(abs(q[p].mean() - right[p].mean()) * len(p) for p in parts) / len(q)) if parts else None


def accuracy(right: Right) -> NDArray[np.float64]:
    return np.array([rows.mean() for rows in right])


def paired(differences: NDArray[np.float64]) -> dict[str, float]:
    """The mean of the clients' differences and its 95 % interval, by Student's law."""
    n = len(differences)
    half = float(differences.std(ddof=1) / np.sqrt(n) * t.ppf(0.975, n - 1))
    middle = float(differences.mean())
    return {"gain": middle, "low": middle - half, "high": middle + half}


# -- the claims -------------------------------------------------------------------------------------------------------------
def gap(rows: Rows, a: str, b: str) -> float:
    return one(rows, "accuracy", method=a) - one(rows, "accuracy", method=b)


def number(rows: Rows, key: str, label: str) -> float:
    """A number of a method, or nan where it could not be had."""
    values = [row[key] for row in rows if row["method"] == label]
    return float("nan") if values[0] is None else float(values[0])


CLAIMS = (
    Claim("Flow as printed is at least as good as FedAvgFT", lambda rows: gap(rows, PAPER, TUNED), above=0.0, must=False,
          theirs="+3.4 points, CIFAR-10 (0.1)"),
    Claim("Flow as printed is at least as good as kNN-Per", lambda rows: gap(rows, PAPER, KNN), above=0.0, must=False,
          theirs="+1.3 points, CIFAR-10 (0.1)"),
    Claim("The eased Flow is within half a point of FedAvgFT", lambda rows: gap(rows, HARD, TUNED), above=-0.005, must=False),
    Claim("Hard and soft inference are alike (eased; distance)", lambda rows: abs(gap(rows, HARD, SOFT)), below=0.01, must=False),
    Claim("Flow's router tells who is right (eased; area under the curve)", lambda rows: number(rows, "auc", HARD), above=0.6,
          must=False),
    Claim("The gate tells who is right (area under the curve)", lambda rows: number(rows, "auc", GATE), above=0.6, must=False),
    Claim("The gate's probabilities are calibrated (mean distance)", lambda rows: number(rows, "calibration", GATE), below=0.1,
          must=False),
    Claim("The gate is above the better of FedAvgFT and averaging", lambda rows: number(rows, "gain", GATE), above=0.0,
          must=False),
    Claim("So it is with a paired interval over clients (its lower end)", lambda rows: number(rows, "low", GATE), above=0.0,
          must=False),
    Claim("The gate is not more than half a point below it", lambda rows: number(rows, "gain", GATE), above=-0.005, must=False),
    Claim("The gate is above stacking by each client", lambda rows: gap(rows, GATE, STACK), above=0.0, must=False),
    Claim("The pool is above the better of FedAvgFT and averaging", lambda rows: number(rows, "gain", POOL), above=0.0,
          must=False),
    Claim("So the pool is with a paired interval over clients (its lower end)", lambda rows: number(rows, "low", POOL), above=0.0,
          must=False),
    Claim("The pool is not more than half a point below it", lambda rows: number(rows, "gain", POOL), above=-0.005, must=False),
    Claim("An oracle would gain two points over FedAvgFT", lambda rows: gap(rows, ORACLE, TUNED), above=0.02, must=False),
)  # fmt: skip


def fair(title: str, laptop: Mapping[str, Any], paper: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a set."""
    return Experiment(
        title,
        "Table 2, Sections 5.1 and 5.2, and what was added here",
        {"laptop": laptop, "paper": {**laptop, **paper}},
        measure,
        Figure("place", "accuracy", "method", "method, in the order of the names", "accuracy of clients"),
        CLAIMS,
        convex=False,
    )
