"""``python -m benchmarks.heterogeneity``: does the interval of R^2 hold the truth, is R found, is zero called zero, are groups?

Features are standard normal, the mean parameters have length 1 (as logits' weights), clients lie around them in a normal cloud of
R^2 = 0, 1 or 4 times the noise of a fit at R = 0; least squares has a noise variance of its own at each client. A pool of clients
is made once per model, d, n and R and cut into federations of m. ``unflagged`` is the share of federations about which
``trusted`` has nothing to warn of, with their coverage.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import fedtailor as ft
from fedtailor.models import linear
from fedtailor.task import Task
from fedtailor.theory import clusters
from fedtailor.theory.fits import Summary, summary
from fedtailor.theory.heterogeneity import estimate, linear_task, summaries

Numbers = NDArray[np.float64]
FEDERATIONS = (5, 10, 20, 50)
LEVELS = (0.0, 1.0, 4.0)
GRID = {  # model: (classes, d, rows per parameter, clients in the pool)
    "linear": (1, (2, 5, 10, 20), (5, 20), 1000),
    "logistic": (2, (2, 5, 10, 20), (5, 20), 300),
    "softmax of 3": (3, (2, 5), (5, 20), 150),
}


class Case(NamedTuple):
    covered: bool
    zero: bool
    error: float
    flagged: bool
    clients: float


def pool(classes: int, d: int, n: int, r2: float, clients: int, seed: int) -> tuple[Numbers, list[Summary]]:
    """True parameters [clients, outputs * d], in the coordinates distances are taken in, and what the clients send."""
    draw = np.random.default_rng(seed)
    center = draw.normal(size=(classes, d))
    clouds = draw.normal(size=(clients, classes, d))
    if classes > 1:
        center, clouds = center - center.mean(0), clouds - clouds.mean(1, keepdims=True)
    truth = center / np.linalg.norm(center) + clouds * np.sqrt(r2 / (max(classes - 1, 1) * d))
    task = Task.from_module(linear(d, classes, bias=False).double(), "mse" if classes == 1 else "cross_entropy")
    sent = []
    for i, weight in enumerate(truth):
        x = draw.normal(size=(n, d))
        logits = x @ weight.T
        noisy = logits[:, 0] + draw.uniform(0.5, 2) * draw.normal(size=n)
        y = noisy if classes == 1 else (logits + draw.gumbel(size=logits.shape)).argmax(1)
        sent.append(summary(task, x, y, name=str(i)))
    return truth.reshape(clients, -1), sent


def cases(truth: Numbers, sent: Sequence[Summary], m: int) -> list[Case]:
    out = []
    for first in range(0, len(sent) - m + 1, m):
        w = truth[first : first + m]
        own = ((w - w.mean(0)) ** 2).sum(1)
        r2 = float(own.mean())
        found = estimate(sent[first : first + m])
        slack = 1e-12  # at R = 0 the truth is rounding
        out.append(
            Case(
                found.interval[0] - slack <= r2 <= found.interval[1] + slack,
                found.zero,
                abs(np.sqrt(found.r2 / r2) - 1) if r2 > slack else np.nan,
                not found.trusted.startswith("Every client"),
                float(np.mean([c.low - slack <= r <= c.high + slack for c, r in zip(found.per_client, own, strict=True)])),
            )
        )
    return out


def row(found: Sequence[Case]) -> str:
    good = [c.covered for c in found if not c.flagged]
    error = [c.error for c in found if not np.isnan(c.error)]
    return (
        f"{len(found):5d} | {np.mean([c.covered for c in found]):7.1%} | "
        f"{len(good) / len(found):4.0%}: {f'{np.mean(good):.1%}' if good else '-':6s} | "
        f"{np.mean([c.zero for c in found]):6.1%} | {f'{np.mean(error):.1%}' if error else '-':6s} | "
        f"{np.mean([c.clients for c in found]):5.1%}"
    )


def intervals(only: Sequence[str]) -> None:
    print(
        f"{'model':13s}| rows/par. |   d | R2/noise |  m | cases | covered | unflagged    | zero   | error of R | single clients"
    )
    for model, (classes, ds, ratios, clients) in GRID.items():
        if only and model.split()[0] not in only:
            continue
        every: dict[tuple[int, float, int], list[Case]] = {}
        for ratio in ratios:
            for d in ds:
                n = ratio * d * max(classes - 1, 1)
                noise = float(np.mean([s.noise for s in pool(classes, d, n, 0.0, 100, 99)[1]]))
                for level in LEVELS:
                    truth, sent = pool(classes, d, n, level * noise, clients, 100 * d + ratio + int(1000 * level))
                    for m in FEDERATIONS:
                        found = cases(truth, sent, m)
                        every.setdefault((ratio, level, m), []).extend(found)
                        if m == FEDERATIONS[2]:
                            print(f"{model:13s}| {ratio:9d} | {d:3d} | {level:8g} | {m:2d} | {row(found)}", flush=True)
        for (ratio, level, m), found in sorted(every.items()):
            print(f"{model:13s}| {ratio:9d} | all | {level:8g} | {m:2d} | {row(found)}", flush=True)


def groups() -> None:
    """Groups whose centers lie 3 times the scatter in a group (true scatter and noise) apart, and federations without groups."""
    print("\ntask           |  m |  d | groups | true scatter | k right | k found")
    for task, noise, n in (("regression", 0.5, 60), ("classification", 0.0, 400)):
        for m, d in ((12, 5), (12, 10), (30, 3), (30, 10)):
            for k in (1, 2, 3):
                for scatter in (0.0, 0.3):
                    found = []
                    for seed in range(10 if task == "regression" else 3):
                        size = np.sqrt(scatter**2 + (noise**2 * d / (n - d - 1) if noise else 12 * d / n))
                        fed = ft.Federation.load(
                            "clusters",
                            clients=m,
                            groups=k,
                            rows=n,
                            d=d,
                            R=scatter,
                            distance=3 * size,
                            task=task,
                            noise=noise,
                            seed=seed,
                            test_rows=1,
                        )
                        found.append(clusters.find(summaries(linear_task(fed, bias=False), fed, draws=10), seed=seed).k)
                    share = np.mean(np.array(found) == k)
                    print(
                        f"{task:15s}| {m:2d} | {d:2d} | {k:6d} | {scatter:12g} | {share:7.0%} | {np.bincount(found)[1:]}",
                        flush=True,
                    )


def main(only: Sequence[str]) -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    intervals(only)
    if not only or "groups" in only:
        groups()
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
