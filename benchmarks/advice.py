"""``make bench-advice``: advice against the best in hindsight, on generated federations and real ones; docs/results/advice.md."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor.advisor.look import pull
from fedtailor.engine.setup import build_task
from fedtailor.theory.heterogeneity import linear_task, measure, on_features

ROUNDS, STEPS, FRESH = 40, 10, 500  # FRESH test rows per client
LAMS = np.geomspace(0.001, 30, 12)
KEY = 23  # of the federations; the advice was tuned on others


def generated(count: int) -> Iterator[tuple[str, ft.Federation, int]]:
    """(name, federation with fresh test rows, groups): linear and logistic, from alike to far apart, every tenth in groups."""
    for i in range(count):
        draw = np.random.default_rng([KEY, i])
        m, n, d = int(draw.choice([10, 20, 40])), int(draw.choice([20, 50, 100])), int(draw.choice([3, 8]))
        logistic = bool(i % 2)
        ratio = float(draw.choice([0.0, 0.3, 1.0, 3.0, 10.0]))  # R^2 in units of the noise of a client's fit
        groups = 3 if i % 10 == 9 else 1
        scale = np.sqrt(ratio * (4 if logistic else 1) / n)  # per coordinate: a logistic row tells about a quarter as much
        centers = draw.normal(size=(groups, d)) * (2.0 if groups > 1 else 1.0)
        truth = centers[np.arange(m) % groups] + scale * draw.normal(size=(m, d))

        def rows(w: Any, many: int, draw: Any = draw, logistic: bool = logistic, d: int = d) -> tuple[Any, Any]:
            x = draw.normal(size=(many, d))
            signal = x @ w
            return x, (draw.random(many) < 1 / (1 + np.exp(-signal))).astype(int) if logistic else signal + draw.normal(size=many)

        parts = [[rows(w, many) for w in truth] for many in (n, FRESH, max(4, n // 4))]
        kind = "classification" if logistic else "regression"
        fed = ft.Federation.from_arrays(*parts, task=kind, name=f"{kind} m={m} n={n} d={d} ratio={ratio:g} groups={groups}")
        yield fed.name, fed, groups


def real() -> Iterator[tuple[str, ft.Federation, int]]:
    for name in ("schools", "exam", "dialysis", "heart"):
        try:
            yield name, ft.Federation.load(name), 1
        except ft.errors.FedtailorError as error:
            print(f"{name}: {error}")
    try:
        yield "mnist, 100 writers, 16 features", on_writers(), 1
    except ft.errors.FedtailorError as error:
        print(f"mnist: {error}")


def on_writers(clients: int = 100) -> ft.Federation:
    """MNIST by writer as a short FedAvg's last layer sees it."""
    fed = ft.Federation.load("mnist", partition="natural", clients=clients, flat=True)
    run = ft.run(ft.FedAvg(lr=0.1, epochs=2), fed, "mlp:16", rounds=15, batch_size=16, evaluate_every=0)
    return replace(on_features(run.task, run.shared["model"], fed), name="mnist")


def pooled_schools() -> list[str]:
    """What a mixed-effects model (random intercept and slopes by school, REML) asks for, and what the exchange of fits does."""
    from statsmodels.regression.mixed_linear_model import MixedLM

    fed = ft.Federation.load("schools")
    x, y = fed.train.x.double().numpy(), fed.train.y.double().numpy()
    school = np.repeat(np.arange(len(fed)), fed.train.sizes)
    design = np.column_stack([x, np.ones(len(x))])
    # minority, sex and ses vary in a school; the mean of ses and the sector are of the school
    _, values, turn = np.linalg.svd(np.column_stack([x[:, :5], np.ones(len(x))]), full_matrices=False)
    random = np.column_stack([x[:, :5], np.ones(len(x))]) @ turn[values > 1e-8 * values[0]].T
    left, size, _ = np.linalg.svd(design, full_matrices=False)
    fit = MixedLM(y, left[:, size > 1e-8 * size[0]] * np.sqrt(len(y)), school, random).fit()
    rows = float(1 / np.mean(1 / fed.train.sizes))
    trace = float(np.trace(np.atleast_2d(fit.cov_re)))
    found = measure(linear_task(fed), fed)
    task = build_task("linear", fed, 0, torch.float32, True)
    mine = [pull(found, fed, task, r2) for r2 in (found.r2, found.interval[1], found.interval[0])]
    advice = ft.advise(fed, rounds=ROUNDS, steps=STEPS)
    return [
        "| schools | spread | lam |",
        "|---|---|---|",
        f"| mixed-effects model (statsmodels, REML) | {trace:.3g} | {fit.scale * random.shape[1] / (rows * trace):.3g} |",
        f"| one exchange of fits | {found.r2:.3g} ({found.interval[0]:.3g} to {found.interval[1]:.3g}) | "
        f"{mine[0]:.3g} ({mine[1]:.3g} to {mine[2]:.3g}) |",
        f"| advice, after the race | | {advice.lam:.3g} |",
    ]


def judge(fed: ft.Federation, groups: int) -> dict[str, Any]:
    """What the advice scores on test, against the best in hindsight; regret in points of accuracy or per cent of MSE."""
    began = time.perf_counter()
    advice = ft.advise(fed, rounds=ROUNDS, steps=STEPS)
    spent = time.perf_counter() - began
    lr = float(advice.algorithm.lr)  # type: ignore[arg-type]
    most = 1 / lr if not isinstance(advice.algorithm, ft.FedCLUP) else 1 / lr - advice.lam
    work = {"steps": STEPS, "lr": 1 / most}
    tried: dict[str, ft.Algorithm] = {"Local": ft.Local(**work), "FedAvg": ft.FedAvg(**work)}
    tried["FedAvgFT"] = ft.FedAvgFT(finetune_steps=STEPS, **work)
    for lam in LAMS:
        tried[f"FedCLUP {lam:.3g}"] = ft.FedCLUP(lam=float(lam), steps=STEPS, lr=1 / (most + lam))
    if groups > 1:
        tried["HypCluster"] = ft.HypCluster(k=groups, **work)
    name = fed.kind.score.name

    def score(algorithm: ft.Algorithm) -> float:
        return float(ft.run(algorithm, fed, rounds=ROUNDS, evaluate_every=0, engine="vectorized").summary[f"{name}_personal"])

    scores = {label: score(algorithm) for label, algorithm in tried.items()}
    mine = score(advice.algorithm)
    best = (min if name == "mse" else max)(scores, key=lambda label: scores[label])
    regret = 100 * (mine / scores[best] - 1) if name == "mse" else 100 * (scores[best] - mine)
    all_steps = sum(len(fed) * ROUNDS * STEPS for _ in tried)
    return {
        "advice": advice,
        "kind": fed.kind,
        "mine": mine,
        "best": best,
        "hindsight": scores[best],
        "regret": regret,
        "share": advice.steps_used / all_steps,
        "local": scores["Local"],
        "fedavg": scores["FedAvg"],
        "seconds": spent,
    }


def main(count: int = 200) -> None:
    found = []
    for name, fed, groups in generated(count):
        found.append({"name": name, "groups": groups, **judge(fed, groups)})
        r = found[-1]
        best = f"best {r['best']} {r['hindsight']:.4f}, regret {r['regret']:.2f}"
        print(f"{len(found)} {name}: {r['advice']!r} {r['mine']:.4f}, {best}", flush=True)
    lines = ["# Advice against the best in hindsight", "", *_summary(found), "", "## Real federations", ""]
    lines += [
        "| set | advice | scored | best in hindsight | scored | regret | Local | FedAvg |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, fed, groups in real():
        r = judge(fed, groups)
        unit = "%" if r["kind"] == "regression" else "points"
        numbers = f"{r['best']} | {r['hindsight']:.4f} | {r['regret']:.2f} {unit} | {r['local']:.4f} | {r['fedavg']:.4f} |"
        lines.append(f"| {name} | `{r['advice']!r}` | {r['mine']:.4f} | {numbers}")
        print(lines[-1], flush=True)
    lines += ["", "## Schools against a mixed-effects model", "", *pooled_schools()]
    print("\n".join(lines[-5:]), flush=True)
    (Path(__file__).parents[1] / "docs" / "results" / "advice.md").write_text("\n".join(lines) + "\n")


def _summary(found: list[dict[str, Any]]) -> list[str]:
    out = [
        f"Written by `make bench-advice`: {len(found)} generated federations (linear and logistic, 10 to 40 clients, 20 to 100 "
        "rows each, a spread from 0 to ten times the noise of a client's fit, every tenth in three groups), "
        f"{FRESH} fresh test rows per client. In hindsight: the best on test of Local, FedAvg, FedAvgFT, FedCLUP with "
        f"{len(LAMS)} lams, HypCluster where there are groups; {ROUNDS} rounds of {STEPS} full-batch steps each.",
        "",
        "| | federations | mean regret | wanted | mean of the worst 5 % | wanted | steps, share of trying them all | wanted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, unit, wanted, worst in (("classification", "points", 1, 3), ("regression", "% of MSE", 2, None)):
        mine = [r for r in found if r["kind"] == kind]
        share = np.mean([r["share"] for r in mine])
        limit = f"{worst} {unit}" if worst else "-"
        mean, tail = _regret(mine)
        wide = f"{mean:.2f} {unit} | {wanted} {unit} | {tail:.2f} {unit} | {limit}"
        out.append(f"| {kind} | {len(mine)} | {wide} | {share:.0%} | 25 % |")
    clear = sum(r["advice"].clusters > 1 for r in found if r["groups"] > 1)
    return [
        *out,
        "",
        f"Of {sum(r['groups'] > 1 for r in found)} federations in groups {clear} were said to be, of the others "
        f"{sum(r['advice'].clusters > 1 for r in found if r['groups'] == 1)}. "
        "Which methods are tried was settled on federations drawn with another key.",
    ]


def _regret(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """(mean, mean of the worst twentieth)."""
    regrets = np.sort([r["regret"] for r in rows])[::-1]
    return float(regrets.mean()), float(regrets[: max(1, len(regrets) // 20)].mean())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
