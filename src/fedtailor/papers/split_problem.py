"""PARTIAL's problem: logistic regression on features split into shared and personal ones, with a regulariser that is not convex.

f_i(u, v) = mean of log(1 + exp(-c (a'u + b'v))) + rho (|u|^2/(1 + |u|^2) + |v|^2/(1 + |v|^2)), c = 1 or -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fedtailor as ft
from fedtailor.data.pool import dealt
from fedtailor.data.readers import images
from fedtailor.engine.setup import build_task
from fedtailor.papers.base import Settings
from fedtailor.task import Task

U, V = "common.weight", "features.weight"


@dataclass(frozen=True, eq=False)
class SplitTask(Task):
    """The task with the regulariser in its risk, and the gradient in closed form."""

    rho: float = 0.0

    def risk_of(self, logits: Tensor, batch: Mapping[str, Tensor], model: dict[str, Tensor], moved: dict[str, Tensor]) -> Tensor:
        squares = [(model[name] ** 2).sum() for name in (U, V)]
        return super().risk_of(logits, batch, model, moved) + self.rho * sum(s / (1 + s) for s in squares)


def gradient(model: Mapping[str, Tensor], batch: Mapping[str, Tensor], rho: float) -> dict[str, Tensor]:
    """Return the gradient of the risk on whole batches, for one client or stacked ones: weights [..., 1, d], rows [..., n, d]."""
    x, u, v = batch["x"], model[U], model[V]
    logit = (x[..., : u.shape[-1]] @ u.mT + x[..., u.shape[-1] :] @ v.mT).squeeze(-1)
    mask = batch.get("mask")
    real = torch.ones_like(logit) if mask is None else mask.to(logit)
    error = (torch.sigmoid(logit) - batch["y"]) * real / real.sum(-1, keepdim=True)
    by_row = error.unsqueeze(-2) @ x
    parts = {U: by_row[..., : u.shape[-1]], V: by_row[..., u.shape[-1] :]}
    return {name: part + 2 * rho * model[name] / (1 + _square(model[name])) ** 2 for name, part in parts.items()}


def _square(weight: Tensor) -> Tensor:
    return (weight**2).sum((-2, -1), keepdim=True)


def load(settings: Settings, seed: int) -> tuple[SplitTask, ft.Federation]:
    """Return the clients' rows, half of whose features are shared: generated ones, or the digits of "mnist" (is it 5 or
    more?)."""
    if settings["data"] == "clup-logistic":
        design = {name: settings[name] for name in ("clients", "rows", "d", "R")}
        federation = ft.Federation.load("clup-logistic", **design, separate=False, test_rows=2, seed=seed)
    else:
        shared_out = digits(settings, seed)
        rows = [shared_out.train.client(i) for i in range(len(shared_out))]
        pairs = [(x.flatten(1).numpy(), (y >= 5).long().numpy()) for x, y in rows]
        federation = ft.Federation.from_arrays(pairs, pairs, task="classification", name="split")
    federation, rho = federation.to(torch.float64), settings["rho"]
    task = build_task(f"split-linear:{federation.train.x.shape[1] // 2}", federation, 0, torch.float64, False)
    values = {field.name: getattr(task, field.name) for field in fields(Task)}
    return SplitTask(**{**values, "gradient": lambda model, batch: gradient(model, batch, rho)}, rho=rho), federation


def digits(settings: Settings, seed: int) -> ft.Federation:
    """MNIST dealt to clients: all of it, or ``rows`` of it for each client, averaged down to ``side`` by ``side`` pixels."""
    pool = images.mnist()
    count = settings["clients"] * settings["rows"] if "rows" in settings else len(pool.y)
    kept = np.sort(np.random.default_rng(seed).permutation(len(pool.y))[:count])
    x = torch.from_numpy(np.asarray(pool.x[kept], np.float32)).reshape(count, 28, 28) / 255
    if side := settings.get("side"):
        x = x.unflatten(1, (side, -1)).unflatten(3, (side, -1)).mean((2, 4))
    part = replace(pool, x=x.numpy(), y=pool.y[kept], owner=None, domain=None)
    return dealt(part, settings["clients"], settings.get("partition", "classes:2"), seed=seed)


class Look(NamedTuple):
    """The clients' exact gradients after a number of rounds: of u and of their v, [clients, parameters]."""

    rounds: int
    by_u: Tensor
    by_v: Tensor

    def norm(self, share: float) -> float:
        """|grad_u f|^2 + share * mean |grad_v f_i|^2."""
        return float((self.by_u.mean(0) ** 2).sum()) + share * float((self.by_v**2).sum(1).mean())


def looks(method: Any, settings: Settings, seed: int, m: int) -> list[Look]:
    """Return the gradients at the start, where u and v are zero, and along a run with m clients per round."""
    task, federation = load(settings, seed)
    batches = [dict(zip("xy", federation.train.client(i), strict=True)) for i in range(len(federation))]
    rho = settings["rho"]

    def gradients(rounds: int, models: list[dict[str, Tensor]]) -> Look:
        slopes = [gradient(model, batch, rho) for model, batch in zip(models, batches, strict=True)]
        return Look(rounds, *(torch.stack([slope[name].reshape(-1) for slope in slopes]) for name in (U, V)))

    start = {name: torch.zeros_like(value) for name, value in task.init().items()}
    out = [gradients(0, [start] * len(batches))]

    def look(now: Any) -> None:
        rounds = now.record["round"] + 1
        if rounds % settings["every"] == 0:
            u = now.shared["model"][U]
            out.append(gradients(rounds, [{U: u, V: now.personal(i)["model"][V]} for i in range(len(batches))]))

    options: dict[str, Any] = {"dtype": "float64", "evaluate_every": 0, "engine": "vectorized", "seed": seed}
    cohort = m if m > 1 else "1 client"
    ft.run(method, federation, task, rounds=settings["rounds"], callbacks=[look], cohort=cohort, **options)
    return out


def floor(values: np.ndarray) -> float:
    """Return the level at the end: the mean of the last third."""
    return float(np.mean(values[-max(1, len(values) // 3) :]))


LAPTOP = {
    **{"data": "clup-logistic", "clients": 10, "rows": 60, "d": 6, "R": 3.0, "rho": 0.01},
    **{"cohort": 5, "lr": 0.3, "steps": 10, "rounds": 300, "every": 5},
}
PAPER = {"data": "mnist", "clients": 10, "rho": 0.01, "cohort": 9, "lr": 0.001, "steps": 25, "rounds": 5000, "every": 20}
METHODS = {"FedAvg-P": ft.FedAvgP, "Scaffold-P": ft.ScaffoldP}


def path(name: str, settings: Settings, seed: int, **changed: Any) -> list[dict[str, Any]]:
    """Return a row per look along a run of a method, with the settings or what was changed of them: lr, steps, cohort, outer.

    ``outer`` is the server's step on u, and u's local steps are as much shorter, as the theorems ask for.
    """
    used = {"outer": 1, **{key: settings[key] for key in ("lr", "steps", "cohort")}, **changed}
    sizes = {"lr": used["lr"] / used["outer"], "personal_lr": used["lr"], "server_lr": float(used["outer"])}
    method = METHODS[name](steps=used["steps"], personal=["features"], **sizes)
    seen = looks(method, settings, seed, used["cohort"])[1:]
    share = used["cohort"] / settings["clients"]
    return [{"round": look.rounds, "method": name, **used, "norm": look.norm(share)} for look in seen]
