"""``make bench-perada``: PerAda's claims on images, its ablations and its privacy; docs/results/perada.md.

``python -m benchmarks.perada [--part P] [--scale S] [--minutes M] [--seeds N] [--folder F]`` does what is missing in the folder's
results.json until the minutes are over (a piece that has begun is finished), then writes the page from what is there; call it
again to go on. The network is EfficientNet-Lite0 with its ImageNet weights at 64 pixels, all of it frozen before its last block,
for every method alike; where a norm must go without a batch, or the start is to be another, it is the last block of a small
ResNet pretrained on CIFAR-100. CIFAR-100 without labels is public. Step sizes are chosen on validation rows of the first seed.
``--scale tiny`` does not touch the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from benchmarks import perada_page, perada_speed
from benchmarks.kept import Results
from fedtailor import tree
from fedtailor.data import rng
from fedtailor.data.pool import PooledData, dealt
from fedtailor.data.readers import images
from fedtailor.data.readers.public import with_public
from fedtailor.engine import prefix
from fedtailor.engine.pretrain import pretrain

BATCH = 64
SHIFTS = tuple(f"{kind}:3" for kind in ("gaussian-noise", "contrast", "pixelate"))
TOP = "dropout=0,last=1"  # what may move at all: the last block and what follows
ADAPTERS, BOTH, FULL = (f"effnet-lite0:{what}size=64,{TOP}" for what in ("adapters,", "adapters,all,", ""))
SMALL_ADAPTERS, SMALL_FULL = f"resnet8:adapters,{TOP}", f"resnet8:{TOP}"
NOISES = (0.5, 1.0, 2.0)  # of DP-SGD, as a multiple of the clipping norm
LRS = (0.01, 0.03, 0.1)
CLIPPED_LRS = (0.03, 0.1, 0.3)  # for the comparison under noise, with and without it
SAME_STEP = perada_page.SAME_STEP  # the pull of a step is lr lam: what KD does is seen at one step size
UNDER_NOISE = ("PerAda", "Ditto, full")
pools = {"cifar10": cache(images.cifar10), "cifar100": cache(images.cifar100), "pacs": cache(partial(images.pacs, 64))}


@dataclass(frozen=True)
class Scale:
    rows: int  # of CIFAR-10, all splits
    public: int  # without labels
    backbone_rows: int  # of CIFAR-100, with labels
    backbone_epochs: int
    rounds: int
    epochs: int  # of a client in a round
    kd_steps: int
    kd_batch: int


SCALES = {
    "tiny": Scale(600, 200, 400, 1, 2, 1, 3, 50),
    "small": Scale(6_000, 1_000, 50_000, 6, 15, 3, 50, 64),
    "medium": Scale(20_000, 10_000, 50_000, 10, 30, 2, 100, 256),
    "full": Scale(60_000, 50_000, 50_000, 20, 200, 10, 500, 2048),
}


@dataclass(frozen=True)
class Case:
    """A federation of images: how they are dealt, who takes part in a round."""

    data: str
    partition: str
    clients: int
    cohort: float
    share: float = 1.0  # of the scale's rows
    lrs: tuple[float, ...] = LRS  # to choose from
    kd_lrs: tuple[float, ...] = (1e-3,)  # PerAda's, and others to show beside it


CASES = {
    "cifar": Case("cifar10", "dirichlet:0.1", 20, 0.4),
    "pacs": Case("pacs", "domain", 4, 1.0, share=0.5, lrs=LRS[1:], kd_lrs=(1e-4, 1e-3)),
}


def methods(scale: Scale, case: str, lr: float = LRS[0]) -> dict[str, tuple[ft.Algorithm, str]]:
    """Label: (method, network). lam and kd_lr are the paper's: of CIFAR-10, and for PACS of Office-Home, by domain as well."""
    work: dict[str, Any] = {"lr": lr, "epochs": scale.epochs}
    kd = {"kd_steps": scale.kd_steps, "kd_batch": scale.kd_batch}
    kd_lr, *others = CASES[case].kd_lrs
    return {
        "PerAda": (ft.PerAda(lam=1.0, kd_lr=kd_lr, **kd, **work), ADAPTERS),
        **{f"PerAda, kd_lr {x:g}": (ft.PerAda(lam=1.0, kd_lr=x, **kd, **work), ADAPTERS) for x in others},
        "PerAda without KD": (ft.PerAda(lam=1.0, kd_steps=0, **work), ADAPTERS),
        SAME_STEP: (ft.PerAda(lam=1.0, kd_steps=0, **work), ADAPTERS),
        "FedAlt, adapters": (ft.FedAlt(personal="adapter", **work), BOTH),
        "FedSim, adapters": (ft.FedSim(personal="adapter", **work), BOTH),
        "Ditto, full": (ft.Ditto(lam=1.0, **work), FULL),
        "FedAvgFT, full": (ft.FedAvgFT(finetune_epochs=scale.epochs, **work), FULL),
    }


# -- data and backbones ------------------------------------------------------------------------------------------------------
def some(pool: PooledData, count: int, seed: int, skip: int = 0) -> PooledData:
    """A seeded sample of a pool, without its first ``skip``."""
    rows = np.sort(rng.generator(seed, "sample").permutation(len(pool.y))[skip : skip + count])
    owner, domain = (None if names is None else names[rows] for names in (pool.owner, pool.domain))
    return replace(pool, x=pool.x[rows], y=pool.y[rows], owner=owner, domain=domain)


def federation(case: Case, scale: Scale, seed: int, public: str = "cifar100", public_rows: int | None = None) -> ft.Federation:
    """The images dealt out, and public ones; those from the clients' own set are images that nobody has."""
    pool, rows, count = pools[case.data](), round(case.share * scale.rows), public_rows or scale.public
    fed = dealt(some(pool, rows, seed), clients=case.clients, partition=case.partition, seed=seed)
    if public == case.data:
        return replace(fed, public=torch.from_numpy(some(pool, count, seed, rows).x).float() / 255)
    return with_public(fed, f"{public}:{min(count, len(pools[public]().y))}", pools, seed=seed)


held = ExitStack()


@lru_cache(maxsize=1)
def keep(case: str, seed: int) -> None:
    """From here on hold what the frozen layers give for this seed's images, and let go of others': the next method needs it.

    Called again for the same, it does nothing.
    """
    held.close()
    held.enter_context(prefix.keep_outputs())


def backbone(scale: Scale, folder: Path, model: str = "resnet8", method: str = "pooled") -> Path:
    """A file of weights: trained on CIFAR-100 pooled, or by FedAvg on the clients' own training rows."""
    path = folder / f"{model.replace(':', '-')}-{method}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if method == "fedavg":
            rows = federation(CASES["cifar"], scale, 0)
        else:
            public = some(pools["cifar100"](), scale.backbone_rows, 0)
            rows = dealt(public, clients=1, partition="iid", test_share=0.1, val_share=0.0)
        epochs = scale.rounds if method == "fedavg" else scale.backbone_epochs
        done = pretrain(rows, model, epochs=epochs, method=method, out=path)
        path.with_suffix(".json").write_text(json.dumps({"accuracy": done.summary["acc_global"]}))
    return path


# -- the pieces --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Bench:
    scale: Scale
    folder: Path
    results: Results

    def played(self, method: ft.Algorithm, model: str, case: str, seed: int, **options: Any) -> dict[str, Any]:
        """What is measured of one run."""
        scale, given = self.scale, CASES[case]
        keep(case, seed)
        fed = options.pop("federation", None) or federation(given, scale, seed)
        run = ft.run(
            method,
            fed,
            model,
            **{
                "rounds": scale.rounds,
                "batch_size": BATCH,
                "cohort": given.cohort,
                "seed": seed,
                "engine": "loop",
                "evaluate_every": 0,
                "backbone": "imagenet",
                "shift": SHIFTS,
                **options,
            },
        )
        return figures(run)

    def lr(self, part: str, label: str) -> float:
        """The step size with the best personal models on validation rows."""
        found = self.results.of(f"tuning {part}").get("PerAda" if label == SAME_STEP else label, {})
        return max((float(lr) for lr in found), key=lambda lr: found[f"{lr:g}"], default=LRS[1])

    def tuning(self, case: str) -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
        """A third of the rounds with every step size, first seed."""
        few = max(1, self.scale.rounds // 3)
        for label in methods(self.scale, case):
            for lr in CASES[case].lrs if label != SAME_STEP else ():
                yield f"tuning {case}", label, f"{lr:g}", lambda label=label, lr=lr: self.validated(case, label, lr, few)  # type: ignore[misc]

    def validated(self, case: str, label: str, lr: float, rounds: int) -> float:
        return float(self.played(*methods(self.scale, case, lr)[label], case, 0, rounds=rounds, shift=())["validation"])

    def claims(self, case: str, seeds: int) -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
        for seed in range(seeds):
            for label in methods(self.scale, case):
                yield case, label, str(seed), lambda label=label, seed=seed: self.claim(case, label, seed)  # type: ignore[misc]

    def claim(self, case: str, label: str, seed: int) -> dict[str, Any]:
        return self.played(*methods(self.scale, case, self.lr(case, label))[label], case, seed)

    def ablations(self, seeds: int) -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
        for seed in range(seeds):
            for name, change in changes(self.scale).items():
                if not change and str(seed) in self.results.of("cifar").get("PerAda", {}):
                    yield "ablations", name, str(seed), lambda seed=seed: self.results.of("cifar")["PerAda"][str(seed)]  # type: ignore[misc]
                    continue
                yield "ablations", name, str(seed), lambda change=change, seed=seed: self.ablation(change, seed)  # type: ignore[misc]

    def ablation(self, change: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """PerAda with one thing changed."""
        options, scale = dict(change), self.scale
        method, model = methods(scale, "cifar", self.lr("cifar", "PerAda"))["PerAda"]
        public = {name: options.pop(name) for name in ("public", "public_rows") if name in options}
        more: dict[str, Any] = {"federation": federation(CASES["cifar"], scale, seed, **public), "shift": ()}
        if init := options.pop("init", None):
            model = SMALL_ADAPTERS
            more["backbone"] = None if init == "random" else backbone(scale, self.folder, method=init)
        return self.played(replace(method, **options), model, "cifar", seed, **more)

    def private(self, seeds: int) -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
        """Step sizes first, without noise and at noise 1; then every noise."""
        few = max(1, self.scale.rounds // 3)
        for label, noise, lr in product(UNDER_NOISE, (None, 1.0), CLIPPED_LRS):
            work = partial(self.noisy, label, noise, 0, lr, rounds=few)
            yield "tuning private", noised(label, noise), f"{lr:g}", lambda work=work: work()["validation"]  # type: ignore[misc]
        for seed, noise, label in product(range(seeds), (None, *NOISES), UNDER_NOISE):
            yield "private", noised(label, noise), str(seed), partial(self.noisy, label, noise, seed)

    def noisy(self, label: str, noise: float | None, seed: int, lr: float | None = None, **options: Any) -> dict[str, Any]:
        """With group norm in the place of batch norm, clipped and noisy gradients."""
        tuned = self.lr("private", noised(label, None if noise is None else 1.0))
        method, model = methods(self.scale, "cifar", lr or tuned)[label]
        method = method if noise is None else replace(method, opt=ft.Private(noise=noise))
        model = f"{SMALL_FULL if model == FULL else SMALL_ADAPTERS},group"
        start = backbone(self.scale, self.folder, "resnet8:group")
        return self.played(method, model, "cifar", seed, backbone=start, shift=(), **options)

    def speed(self, seeds: int) -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
        for time in range(seeds):
            for label, models in perada_speed.NETWORKS.items():
                yield "speed", label, str(time), lambda models=models: self.timed(*models)  # type: ignore[misc]

    def timed(self, full: str, adapters: str) -> dict[str, float]:
        """Four clients with 160 images each."""
        few = replace(self.scale, rows=640, public=min(self.scale.public, 1_000))
        fed = federation(Case("cifar10", "iid", 4, 1.0), few, 0)
        kd = {"kd_steps": self.scale.kd_steps, "kd_batch": self.scale.kd_batch}
        return perada_speed.compared(fed, full, adapters, BATCH, kd)


def noised(label: str, noise: float | None) -> str:
    return f"{label}, {'not private' if noise is None else f'noise {noise:g}'}"


def changes(scale: Scale) -> dict[str, dict[str, Any]]:
    """The ablations: what is changed of PerAda, CIFAR-10."""
    steps, rows = scale.kd_steps, scale.public
    return {
        f"distillation, {steps // 4} steps": {"kd_steps": max(1, steps // 4)},
        f"distillation, {steps} steps (as above)": {},
        f"distillation, {steps * 3} steps": {"kd_steps": steps * 3},
        f"public, {rows // 10} images": {"public_rows": max(1, rows // 10)},
        f"public, {rows // 2} images": {"public_rows": rows // 2},
        "public images of CIFAR-10 that nobody has": {"public": "cifar10"},
        "public images of PACS": {"public": "pacs"},
        "taught mean probabilities, not logits": {"teach": "probabilities"},
        "lam 0.1": {"lam": 0.1},
        "lam 10": {"lam": 10.0},
        "ResNet-8, pretrained on CIFAR-100": {"init": "pooled"},
        "ResNet-8, by FedAvg of the clients": {"init": "fedavg"},
        "ResNet-8, at random": {"init": "random"},
    }


def figures(run: Any) -> dict[str, Any]:
    s = run.summary
    return {
        "local": s["acc_personal"],
        "global": s["acc_global_test"],
        "shifted": s.get("acc_shifted_test"),
        "shared": s["acc_global"],
        "validation": s["val_acc_personal"],
        "trained": s["trained_parameters"],
        "sent": tree.size(tree.trainable(run.shared["model"])),
        "seconds": float(np.median([r["seconds"] for r in run.history])),
        "phi": s.get("ensemble_distance"),
        "phi_mean": s.get("ensemble_distance_mean"),
        "apart": s.get("personal_distance"),
        "epsilon": s.get("epsilon"),
        "settings": s["settings"],
    }


def jobs(bench: Bench, part: str, seeds: int) -> Iterator[tuple[str, str, str, Callable[[], Any]]]:
    """(part, name, key, what to do) of every piece."""
    if part in CASES:
        yield from bench.tuning(part)
        yield from bench.claims(part, seeds)
    elif part in ("ablations", "private", "speed"):
        yield from getattr(bench, part)(seeds)


def main(arguments: Sequence[str] | None = None) -> None:
    parts = (*CASES, "ablations", "private", "speed")
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--part", action="append", choices=[*parts, "write"], help="may be given several times; default: all")
    ask.add_argument("--scale", choices=SCALES, default="small")
    ask.add_argument("--minutes", type=float, default=float("inf"))
    ask.add_argument("--seeds", type=int, default=3)
    ask.add_argument("--folder", type=Path, default=Path("runs/bench-perada"))
    given = ask.parse_args(arguments)
    folder = given.folder / given.scale
    results = Results(folder, given.minutes)
    bench = Bench(SCALES[given.scale], folder, results)
    for part in given.part or parts:
        for piece in jobs(bench, part, given.seeds):
            if not results.do(*piece):
                break
    results.sort(piece[:2] for part in parts for piece in jobs(bench, part, 1))
    backbones = {path.stem: json.loads(path.with_suffix(".json").read_text()) for path in folder.glob("*.safetensors")}
    target = folder / "perada.md" if given.scale == "tiny" else Path(__file__).parents[1] / "docs" / "results" / "perada.md"
    target.write_text(perada_page.page(results, given.scale, bench.scale, CASES, backbones, SHIFTS, BATCH, LRS), encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
