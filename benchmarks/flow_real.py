"""Flow on real federations: its claims, each held or not, and what it costs beside the formulas of its paper's Table 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from benchmarks import flow_map
from fedtailor import models
from fedtailor.algorithms.flow import TABLE_4
from fedtailor.data.pool import PooledData, dealt
from fedtailor.data.readers import images
from fedtailor.errors import FedtailorError
from fedtailor.runs.history import Run

EPOCHS = [1, 5]
GRID: dict[str, list[float]] = {
    "local_epochs": EPOCHS,  # of v, in a round and to predict
    "finetune_epochs": EPOCHS,
    "personal_epochs": EPOCHS,
    "gamma": [1e-3, 0.1],
    "lam": [0.03, 0.3],
    "alpha": [0.25, 0.5, 0.75],
}
METHODS: dict[str, ft.Algorithm] = {
    "Flow": ft.Flow(local_epochs=5),
    "FedAvgFT": ft.FedAvgFT(finetune_epochs=5),
    "PI-Flow": ft.Flow(variant="pi", local_epochs=1),
    "Flow, no regulariser": ft.Flow(local_epochs=5, gamma=0.0),
    "Flow, eased": ft.Flow(local_epochs=5, deploy_epochs=5, **flow_map.EASED),
    "Ditto": ft.Ditto(lam=0.3, personal_epochs=1),
    "APFL": ft.APFL(alpha=0.5),
    "FedAvg": ft.FedAvg(),
}


@dataclass(frozen=True)
class Set:
    """A real federation and how it is trained."""

    load: Callable[[], ft.Federation]
    model: str
    rounds: int = 40
    batch: int = 20
    lrs: tuple[float, ...] = (0.03, 0.1, 0.3)
    engine: str = "loop"
    tuned: tuple[str, ...] = tuple(GRID)
    words: str = ""


@cache
def features(rows: int, size: int = 96, kept: int = 128) -> PooledData:
    """A random part of CIFAR-10 as EfficientNet-Lite0 (ImageNet weights) sees it, projected at random to fewer numbers."""
    pool = images.cifar10()
    chosen = np.sort(np.random.default_rng(0).permutation(len(pool.y))[:rows])
    task = ft.Task.from_module(models.build(f"effnet-lite0:head,size={size}", (3, 32, 32), 10, backbone="imagenet"))
    assert task.features is not None
    model, parts = task.init(), np.array_split(chosen, max(1, rows // 64))
    with torch.no_grad():
        x = torch.cat([task.features(model, torch.from_numpy(pool.x[part]).float() / 255) for part in parts])
    draw = torch.randn(x.shape[1], kept, generator=torch.Generator().manual_seed(0))
    return replace(pool, x=(x @ draw / x.shape[1] ** 0.5).numpy(), y=pool.y[chosen])


def cifar10(partition: str, rows: int = 4000, clients: int = 20) -> ft.Federation:
    return dealt(features(rows), clients=clients, partition=partition)


def shakespeare(roles: int = 8, rows: int = 150) -> ft.Federation:
    """The roles with the most to say, and the first rows of each."""
    fed = ft.Federation.load("shakespeare", clients=roles, length=20, per_position=True)
    parts = [
        [tuple(t[:rows] for t in split.client(i)) for i in range(roles)] for split in (fed.train, fed.val, fed.test) if split
    ]
    return ft.Federation.from_arrays(parts[0], parts[2], parts[1], classes=fed.classes, names=fed.names, tokens=fed.tokens)


SEEN = (
    "20 clients, 4,000 images as 128 random projections of what a frozen EfficientNet-Lite0 makes of them at 96 pixels, MLP with "
    "64 and 32 units"
)
SETS = {
    "MNIST by writer": Set(
        lambda: ft.Federation.load("mnist", partition="natural", clients=40),
        "mlp:64,32",
        engine="vectorized",
        words="40 writers, MLP with 64 and 32 units",
    ),
    "CIFAR-10, Dirichlet 0.1": Set(lambda: cifar10("dirichlet:0.1"), "mlp:64,32", engine="vectorized", words=SEEN),
    "CIFAR-10, Dirichlet 0.6": Set(lambda: cifar10("dirichlet:0.6"), "mlp:64,32", engine="vectorized", words=SEEN),
    "Shakespeare by role": Set(
        lambda: shakespeare(),
        "lstm:8,64",
        rounds=30,
        lrs=(3.0, 6.0),
        tuned=("local_epochs", "finetune_epochs", "personal_epochs", "lam", "alpha"),
        words="8 roles, at most 150 rows of 20 characters of each in every split, an LSTM of 64 units, accuracy per character",
    ),
}
TINY = {
    "digits, Dirichlet 0.3": Set(
        lambda: ft.Federation.load("digits", clients=4, partition="dirichlet:0.3"), "mlp:8", 2, words="4 clients"
    )
}


def real(what: Set, label: str, seeds: int, folder: Path) -> Any:
    """A method on a set: tuned on validation rows, then a run per seed."""
    try:
        fed = what.load()
    except FedtailorError as error:
        return {"missing": str(error)}
    found = ft.compare(
        {label: METHODS[label]},
        fed,
        what.model,
        rounds=what.rounds,
        seeds=seeds,
        tune={"lr": list(what.lrs), **_grid(METHODS[label], what.tuned)},
        batch_size=what.batch,
        evaluate_every=0,
        engine=what.engine,
        out=folder / label,
        resume=True,
    )
    return {"runs": [measured(run) for run in found.all[label]]}


def _grid(method: ft.Algorithm, tuned: Sequence[str]) -> dict[str, list[float]]:
    kept = {name: values for name, values in GRID.items() if name in tuned and hasattr(method, name)}
    return {name: values for name, values in kept.items() if name != "gamma" or method.gamma}  # type: ignore[attr-defined]


def measured(run: Run) -> dict[str, Any]:
    names = (
        "acc_personal",
        "acc_global",
        "share_benefit",
        "both_correct",
        "global_only",
        "personal_only",
        "settings",
        "trained_parameters",
    )
    sent = run.summary["bytes_up"] / sum(line["cohort"] for line in run.history)
    out = {name: run.summary[name] for name in names} | {"bytes_up": sent, "routing": run.summary.get("routing")}
    return out | ({"hard_as_soft": agreement(run)} if run.algorithm.routed else {})


@torch.no_grad()
def agreement(run: Run) -> float:
    """Share of test rows on which hard and soft inference give the same class."""
    ways = [replace(run.algorithm, inference=way) for way in ("hard", "soft")]  # type: ignore[call-arg]
    same = []
    for i in range(len(run.federation)):
        x, _ = run.federation.test.client(i)
        x = x.to(torch.float32) if x.is_floating_point() else x
        answers = [way.predict(run.task, run.shared, run.personal[i], x).argmax(-1) for way in ways]
        same.append((answers[0] == answers[1]).double().flatten())
    return float(torch.cat(same).mean())


def tables(name: str, found: Mapping[str, Any]) -> list[str]:
    missing = next((f["missing"] for f in found.values() if "missing" in f), None)
    if missing is not None:
        return [f"Not run: {missing}"]
    runs = {label: f["runs"] for label, f in found.items()}
    what = {**SETS, **TINY}[name]
    lines = [
        f"{what.words}; {what.rounds} rounds of an epoch, batches of {what.batch}; settings chosen on validation "
        f"rows, lr of {what.lrs} and of { ({name: GRID[name] for name in what.tuned}) }; {len(next(iter(runs.values())))} seeds.",
        "",
        "| method | settings | personal | shared | clients that benefit | global-only rows | hard as soft |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, mine in runs.items():
        scores = [r["acc_personal"] for r in mine]
        cells = [_mean(mine, key) for key in ("acc_global", "share_benefit", "global_only", "hard_as_soft")]
        lines.append(
            f"| {label} | `{mine[0]['settings']}` | {np.mean(scores):.4f} ± {np.std(scores):.4f} | {' | '.join(cells)} |"
        )
    return [*lines, "", *_claims(runs), "", *_costs(runs)]


def _mean(runs: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [r.get(key) for r in runs]
    return "-" if None in values else f"{np.mean(values):.4f}"


def _claims(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The paper's claims on this set, by means over seeds; a rival that has not been run is not counted."""
    if "Flow" not in runs:
        return []
    score = {
        key: {label: float(np.mean([r[key] for r in mine])) for label, mine in runs.items() if mine[0][key] is not None}
        for key in ("acc_personal", "share_benefit", "global_only")
    }
    acc = score["acc_personal"]
    rivals = [label for label in ("FedAvgFT", "PI-Flow", "Ditto", "APFL") if label in runs]
    claims = [
        (f"personal accuracy at least {label}'s", acc["Flow"] >= acc[label], f"{acc['Flow']:.4f} against {acc[label]:.4f}")
        for label in rivals[:2]
    ]
    for key, words, sign in (
        ("share_benefit", "the largest share of clients that benefit", 1),
        ("global_only", "the fewest global-only rows", -1),
    ):
        mine, others = score[key]["Flow"], {label: score[key][label] for label in rivals if label in score[key]}
        if others:
            best = max(others, key=lambda label: sign * others[label])
            claims.append((words, sign * mine >= sign * others[best], f"{mine:.4f} against {best}'s {others[best]:.4f}"))
    if "Flow, no regulariser" in runs:
        without = acc["Flow, no regulariser"]
        claims.append(("the regulariser helps", acc["Flow"] >= without, f"{acc['Flow']:.4f} with, {without:.4f} without"))
    return [f"- {words}: {'held' if held else '**not held**'} ({numbers})" for words, held, numbers in claims]


def _costs(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Table 4's formulas with this model's sizes, beside what was counted."""
    routing = next((mine[0]["routing"] for mine in runs.values() if mine[0]["routing"]), None)
    if routing is None:
        return []
    w, psi = routing["model_parameters"], routing["router_parameters"]
    lines = [
        f"|w| = {w:,}, |psi| = {psi:,}. Parameters kept and sent by the formulas of the paper's Table 4; sent as counted on the "
        "wire (4 bytes a number); multiply-adds of a prediction, as a multiple of the model's.",
        "",
        "| method | kept, Table 4 | sent, Table 4 | sent, counted | trained, counted | prediction |",
        "|---|---|---|---|---|---|",
    ]
    for label, mine in runs.items():
        kept, sent = TABLE_4.get(label.split(",")[0], (None, None))
        numbers = [f"{a[0] * w + a[1] * psi:,}" if a else "-" for a in (kept, sent)]
        own = mine[0]["routing"]
        work = f"{own['multiply_adds_personal'] / own['multiply_adds_shared']:.2f}" if own else "1 (one model)"
        lines.append(
            f"| {label} | {' | '.join(numbers)} | {mine[0]['bytes_up'] / 4:,.0f} | {mine[0]['trained_parameters']:,} | {work} |"
        )
    return lines
