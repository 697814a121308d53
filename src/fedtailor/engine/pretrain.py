"""``pretrain``: a whole network trained on public rows, to start from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from fedtailor import models
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.data.federation import Federation
from fedtailor.data.split import Split
from fedtailor.engine.run import run
from fedtailor.errors import InvalidArgument
from fedtailor.local import SGD
from fedtailor.local.schedule import Cosine
from fedtailor.runs import files
from fedtailor.runs.history import Run

METHODS = ("pooled", "fedavg")


def pretrain(
    federation: Federation,
    model: str = "resnet8",
    *,
    epochs: int = 10,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    batch_size: int = 64,
    method: str = "pooled",
    seed: int = 0,
    backbone: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Train every weight of ``model`` by SGD, its step size falling to zero along a cosine; ``out`` is the file for the weights.

    ``pooled`` puts the clients' rows together, one epoch after another; ``fedavg`` leaves them where they are, an epoch a round.
    """
    if method not in METHODS:
        raise InvalidArgument(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    if not isinstance(model, str) or not models.takes_backbone(model):
        those = ", ".join(name for name in models.names() if models.takes_backbone(name))
        raise InvalidArgument(f"a network that others can start from is one of {those}, not {model!r}")
    learner = FedAvg(lr=Cosine(lr, epochs), epochs=1, opt=SGD(momentum=momentum, weight_decay=weight_decay))
    rows = together(federation) if method == "pooled" else federation
    shape = tuple(federation.train.x.shape[1:])
    if not all(p.requires_grad for p in models.build(model, shape, federation.outputs).parameters()):
        raise InvalidArgument(f"pretraining trains the whole network; leave the adapters (or head) out of {model!r}")
    done = run(
        learner,
        rows,
        model,
        rounds=epochs,
        batch_size=batch_size,
        seed=seed,
        weights="size",
        engine="loop",
        backbone=backbone,
        callback=callback,
    )
    if out is not None:
        weights = {name: value.contiguous() for name, value in done.state_dict().items()}
        files.write(Path(out), save(weights, metadata={"model": model, "data": federation.name}))
    return done


def together(federation: Federation) -> Federation:
    """The rows of all clients as those of one."""

    def pooled(split: Split) -> Split:
        return Split(split.x, split.y, np.array([0, len(split.y)]))

    return replace(
        federation,
        train=pooled(federation.train),
        test=pooled(federation.test),
        val=None if federation.val is None else pooled(federation.val),
        names=("everyone",),
        truth=None,
        facts={},
    )
