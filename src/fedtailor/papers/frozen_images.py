"""PERADA on images: a pretrained network that is frozen but for its last blocks, and adapters in them.

Local-test is the personal models' accuracy on their clients' own test rows, Global-test that on the union of all test rows; the
corrupted test is the union under corruptions of our own. What the frozen layers make of a seed's images is computed once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedtailor as ft
from fedtailor import models, tree
from fedtailor.data import rng, shift
from fedtailor.data.pool import PooledData, dealt
from fedtailor.data.readers import images
from fedtailor.data.readers.public import with_public
from fedtailor.engine import prefix
from fedtailor.engine.pretrain import pretrain
from fedtailor.papers.base import Pieces, Settings

POOLS: dict[str, Callable[[], PooledData]] = {
    "cifar10": cache(images.cifar10),
    "cifar100": cache(images.cifar100),
    "pacs": cache(partial(images.pacs, 64)),
}
SHIFTS = tuple(f"{kind}:3" for kind in ("gaussian-noise", "contrast", "pixelate"))
PARTS = {"adapters": ["adapters"], "both": ["adapters", "all"], "full": []}
held, scratch = ExitStack(), ExitStack()


@dataclass(frozen=True)
class Way:
    """A method and what moves of the network: ``adapters``, ``both`` (them and the layers around them), or ``full``, which has no
    adapters. ``change`` may name other public rows (``public``, ``public_rows``), another ``start``, or a ``network``."""

    method: ft.Algorithm
    part: str = "adapters"
    change: Mapping[str, Any] = field(default_factory=dict)


def network(name: str, part: str) -> str:
    """Return a network's name with what moves of it: resnet8:last=1 as resnet8:adapters,last=1."""
    kind, _, options = name.partition(":")
    words = ",".join([*PARTS[part], *([options] if options else [])])
    return f"{kind}:{words}" if words else kind


def input_layer(settings: Settings) -> str:
    """Return the first module of the full network in which something moves."""
    task = ft.Task.from_module(models.build(network(settings["network"], "full"), (3, 32, 32), 10))
    return next(iter(task.init())).rpartition(".")[0]


# -- data and starts ---------------------------------------------------------------------------------------------------------
def some(pool: PooledData, count: int, seed: int, skip: int = 0) -> PooledData:
    """Return a seeded sample of a pool, without its first ``skip``."""
    rows = np.sort(rng.generator(seed, "sample").permutation(len(pool.y))[skip : skip + count])
    owner, domain = (None if names is None else names[rows] for names in (pool.owner, pool.domain))
    return replace(pool, x=pool.x[rows], y=pool.y[rows], owner=owner, domain=domain)


def federation(settings: Settings, seed: int, public: str = "cifar100", public_rows: int | None = None) -> ft.Federation:
    """Deal images out, and add public ones; those from the clients' own set are images that nobody has."""
    pool, count = POOLS[settings["set"]](), public_rows or settings["public"]
    mine = some(pool, settings["images"], seed)
    fed = dealt(mine, clients=settings["clients"], partition=settings["partition"], seed=seed)
    if public == settings["set"]:
        return replace(fed, public=torch.from_numpy(some(pool, count, seed, len(mine.y)).x).float() / 255)
    return with_public(fed, f"{public}:{min(count, len(POOLS[public]().y))}", POOLS, seed=seed)


@lru_cache(maxsize=1)
def keep(data: str, seed: int) -> None:
    """Hold what the frozen layers give for this seed's images, and let go of others': the next method needs it."""
    held.close()
    held.enter_context(prefix.keep_outputs())


def let_go() -> None:
    """Hold no outputs of frozen layers any longer."""
    held.close()
    keep.cache_clear()


@cache
def folder() -> Path:
    return Path(scratch.enter_context(tempfile.TemporaryDirectory(prefix="fedtailor-")))


def start(settings: Settings, name: str, how: str) -> Path | str | None:
    """Return what a network begins with: ``imagenet``, nothing (``random``), or a file trained on CIFAR-100 (``pooled``) or by
    FedAvg on the first seed's clients (``fedavg``)."""
    if how in ("imagenet", "random"):
        return how if how == "imagenet" else None
    kind = name.partition(":")[0] + (":group" if "group" in name else "")
    path = folder() / f"{kind.replace(':', '-')}-{how}.safetensors"
    if not path.exists():
        labelled = some(POOLS["cifar100"](), settings["start_images"], 0)
        alone = dealt(labelled, clients=1, partition="iid", test_share=0.1, val_share=0.0)
        rows, epochs = (alone, settings["start_epochs"]) if how == "pooled" else (federation(settings, 0), settings["rounds"])
        pretrain(rows, kind, epochs=epochs, method=how, out=path)
    return path


# -- measuring ---------------------------------------------------------------------------------------------------------------
def measured(ways: Callable[[Settings], Mapping[str, Way]]) -> Pieces:
    """Return the measurement of ways to train, a piece each."""
    return Pieces(
        lambda settings: list(ways(settings)), lambda settings, seed, name: played(settings, seed, name, ways(settings)[name])
    )


def played(settings: Settings, seed: int, label: str, way: Way) -> list[dict[str, Any]]:
    """Return what is measured of one run, as a row."""
    keep(settings["set"], seed)
    change = dict(way.change)
    public = {name: change.pop(name) for name in ("public", "public_rows") if name in change}
    name, how = change.pop("network", settings["network"]), change.pop("start", settings["start"])
    options = {key: settings[key] for key in ("rounds", "batch_size", "cohort")}
    run = ft.run(
        way.method,
        federation(settings, seed, **public),
        network(name, way.part),
        **{**options, "shift": SHIFTS if settings["shift"] else (), **change},
        backbone=start(settings, name, how),
        seed=seed,
        engine="loop",
        evaluate_every=0,
    )
    s = run.summary
    return [
        {
            "method": label,
            "local": s["acc_personal"],
            "global": s["acc_global_test"],
            "corrupted": s.get("acc_shifted_test"),
            "shared": s["acc_global"],
            "trained": s["trained_parameters"],
            "sent": tree.size(tree.trainable(run.shared["model"])) if "model" in run.shared else 0,
            "phi_mean": s.get("ensemble_distance_mean"),
            "phi_after": s.get("ensemble_distance"),
            "epsilon": s.get("epsilon"),
            **(
                of_shared(run, bool(settings["shift"]))
                if s["acc_global"] is not None
                else {"union": None, "union_corrupted": None}
            ),
        }
    ]


def of_shared(run: Any, shifted: bool) -> dict[str, float | None]:
    """Return the shared model's accuracy on the union of the test rows, and under the corruptions."""
    test = run.federation.test

    def right(x: torch.Tensor) -> float:
        return float((run.predict_global(x).argmax(-1) == test.y).double().mean())

    worse = [right(shift.corrupted(test.x, *shift.parse(spec))) for spec in SHIFTS] if shifted else []
    return {"union": right(test.x), "union_corrupted": float(np.mean(worse)) if worse else None}
