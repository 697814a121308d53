"""CLUP on images: clients with few or many of the classes; LocalTrain, FedCLUP and pFedMe with three lams, GlobalTrain.

The server averages (gamma = 1/lam), as in the paper where L is unknown. Table 4 judges on the whole test set, classes that a
client has never seen included (``whole``); ``own`` is on a client's own test rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.data.pool import dealt
from fedtailor.data.readers import images
from fedtailor.engine.setup import build_task
from fedtailor.papers.base import Claim, Experiment, Figure, Rows, Settings, by_value, column, one

LOCAL, SHARED = "LocalTrain", "GlobalTrain"
POOLS = {"mnist": images.mnist, "emnist": lambda: images.emnist(47), "cifar10": images.cifar10}


def load(settings: Settings, classes: int, seed: int) -> ft.Federation:
    """Deal some of a set's rows to clients with this many classes each; a seed draws rows and clients anew."""
    pool = POOLS[settings["set"]]()
    kept = np.sort(np.random.default_rng(seed).permutation(len(pool.y))[: settings["clients"] * settings["rows"]])
    part = replace(pool, x=pool.x[kept], y=pool.y[kept], owner=None, domain=None)
    shares: dict[str, Any] = {"test_share": 0.3, "val_share": 0.1}
    return dealt(part, settings["clients"], f"classes:{classes}", seed=seed, flat=settings["model"] == "linear", **shares)


def methods(settings: Settings) -> dict[str, Any]:
    """Return the columns of Table 4, from no sharing to one model."""
    lr, epochs = settings["lr"], settings["epochs"]
    clup = {f"FedCLUP, lam = {lam:g}": ft.FedCLUP(lam=lam, lr=lr, epochs=epochs) for lam in settings["lams"]}
    inner = {"inner_lr": lr, "inner_steps": 5, "epochs": epochs}
    pfedme = {f"pFedMe, lam = {lam:g}": ft.PFedMe(lam=lam, lr=0.5 / lam, **inner) for lam in settings["pfedme"]}
    return {LOCAL: ft.Local(lr=lr, epochs=epochs), **clup, SHARED: ft.FedAvg(lr=lr, epochs=epochs), **pfedme}


def measure(settings: Settings, seed: int) -> list[dict[str, Any]]:
    """Return a row per round: training loss and accuracy on own test rows, means over clients; in the last round also
    ``whole``."""
    out: list[dict[str, Any]] = []
    for classes in settings["classes"]:
        federation = load(settings, classes, seed)
        task = build_task(settings["model"], federation, 0, torch.float32, True)
        for label, method in methods(settings).items():
            rows: list[dict[str, Any]] = []

            def look(now: Any, method: Any = method, rows: Any = rows, fed: Any = federation, task: Any = task) -> None:
                rows.append({"round": now.record["round"] + 1, "whole": None, **judged(now, method, fed, task)})

            options: dict[str, Any] = {"batch_size": settings["batch_size"], "evaluate_every": 0, "engine": "vectorized"}
            run = ft.run(method, federation, task, rounds=settings["rounds"], callbacks=[look], seed=seed, **options)
            rows[-1]["whole"] = run.summary["acc_global_test"]
            out += [{"classes": classes, "panel": f"{classes} classes", "method": label, **row} for row in rows]
    return out


@torch.no_grad()
def judged(now: Any, method: Any, federation: ft.Federation, task: Any) -> dict[str, float]:
    """Return the clients' mean loss on training rows and accuracy on own test rows, in a round."""
    losses, right = [], []
    for i in range(len(federation)):
        personal = now.personal(i)
        (x, y), (fresh, answers) = federation.train.client(i), federation.test.client(i)
        losses.append(float(torch.nn.functional.cross_entropy(method.predict(task, now.shared, personal, x), y)))
        right.append(float((method.predict(task, now.shared, personal, fresh).argmax(-1) == answers).double().mean()))
    return {"loss": float(np.mean(losses)), "own": float(np.mean(right))}


# -- the claims -------------------------------------------------------------------------------------------------------------
def sharing(rows: Rows) -> list[str]:
    """Return the degrees of sharing, from none over each lam to one model."""
    return [label for label in dict.fromkeys(row["method"] for row in rows) if not label.startswith("pFedMe")]


def ends(rows: Rows, key: str, classes: int) -> np.ndarray:
    """Return a measure in the last round, by degree of sharing."""
    last = max(row["round"] for row in rows)
    return np.array([one(rows, key, method=label, classes=classes, round=last) for label in sharing(rows)])


def levels(rows: Rows) -> list[int]:
    """Return the numbers of classes, from the fewest on."""
    return sorted({row["classes"] for row in rows})


def curves(rows: Rows, key: str, classes: int) -> np.ndarray:
    """Return a measure over rounds of every lam, from the smallest on: [lams, rounds]."""
    return np.stack([column(rows, key, method=label, classes=classes) for label in sharing(rows)[1:-1]])


def smallest_step(rows: Rows) -> float:
    return float(np.diff(ends(rows, "whole", levels(rows)[-1])).min())


def over_lam(rows: Rows) -> float:
    return min(float(np.subtract(*ends(rows, "whole", classes)[[-2, 1]])) for classes in levels(rows))


def local_behind(rows: Rows) -> float:
    return min(float(whole[1:].min() - whole[0]) for whole in (ends(rows, "whole", classes) for classes in levels(rows)))


def homogeneity(rows: Rows) -> float:
    return float((ends(rows, "whole", levels(rows)[-1]) - ends(rows, "whole", levels(rows)[0])).min())


def moves(rows: Rows) -> float:
    """Return by how many places the best degree of sharing, on own rows, moves towards local training as clients differ more."""
    few, most = (int(np.argmax(ends(rows, "own", classes))) for classes in (levels(rows)[0], levels(rows)[-1]))
    return float(most - few)


def first_round(rows: Rows) -> float:
    losses = [curves(rows, "loss", classes)[:, 0] for classes in levels(rows)]
    return min(float(loss[-1] / loss[0]) for loss in losses)


def settling(rows: Rows) -> float:
    """Rounds until the accuracy on own rows is within two points of its last: the largest lam's less the smallest's."""
    rounds = [int(np.flatnonzero(a >= a[-1] - 0.02)[0]) + 1 for a in curves(rows, "own", levels(rows)[-1])]
    return float(rounds[-1] - rounds[0])


def crossing(rows: Rows) -> float:
    return max(float(len(set(np.argmax(curves(rows, "own", classes), 0).tolist()))) for classes in levels(rows))


def pfedme(rows: Rows) -> float:
    labels = [label for label in dict.fromkeys(row["method"] for row in rows) if label.startswith("pFedMe")]
    where = {"classes": levels(rows)[-1], "round": max(row["round"] for row in rows)}
    return one(rows, "whole", method=labels[-1], **where) - one(rows, "whole", method=labels[0], **where)


def skew(title: str, laptop: Mapping[str, Any], paper: Mapping[str, Any], theirs: str) -> Experiment:
    """Return the experiment of a set and a network; ``theirs`` is its line in Table 2."""
    more = (Claim("pFedMe too: its largest lam is above its smallest on the whole test, most classes", pfedme, above=0.0,
                  must=False),) if laptop["pfedme"] else ()  # fmt: skip
    return Experiment(
        title,
        "Tables 2 and 4, Figure 5",
        {"laptop": laptop, "paper": {**laptop, **paper}},
        by_value("classes", measure),
        Figure("round", "loss", "method", "rounds", "training loss", log_y=True, panel="panel"),
        (*CLAIMS, replace(TABLE_2, theirs=theirs), *more),
        convex=False,
    )


TABLE_2 = Claim(
    "Whole test, most classes: accuracy rises from LocalTrain over each lam to GlobalTrain (smallest step)",
    smallest_step,
    above=0.0,
    must=False,
)
CLAIMS = (
    Claim("Whole test: the largest lam is above the smallest at every number of classes (least)", over_lam, above=0.0,
          must=False),
    Claim("Whole test: LocalTrain is behind all others at every number of classes (least)", local_behind, above=0.0, must=False),
    Claim("Whole test: every method is better with the most classes than with the fewest (least)", homogeneity, above=0.0,
          must=False),
    Claim("Own rows: the best degree of sharing moves towards local training with fewer classes (places)", moves, above=0.0,
          must=False),
    Claim("In the first round the smallest lam is ahead (training loss of the largest over its own, least)", first_round,
          above=1.0, must=False),
    Claim("A small lam needs fewer rounds (to two points below its last accuracy; largest lam's less smallest's)", settling,
          above=0.0, must=False),
    Claim("The curves cross: how many lams are best on own rows at some round", crossing, above=1.5, must=False),
)  # fmt: skip
