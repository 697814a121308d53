"""``pretrain``: a whole network trained on public rows, to start from elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtailor import models
from fedtailor.algorithms import METHODS
from fedtailor.algorithms.settings import find
from fedtailor.data.federation import Federation
from fedtailor.data.redeal import pooled
from fedtailor.engine.checked import taking
from fedtailor.engine.options import PretrainOptions
from fedtailor.engine.run import run
from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.local import SGD
from fedtailor.local.schedule import Cosine
from fedtailor.runs import files, weights
from fedtailor.runs.history import Run

POOLED = "pooled"
LEARNER = next(kind for kind in METHODS if kind.yardstick == "together")  # plainly one model for all


@taking(PretrainOptions)
def pretrain(
    federation: Federation,
    model: str = "resnet8",
    *,
    out: str | os.PathLike[str] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
    **settings: Any,
) -> Run:
    """Train every weight of ``model`` by SGD, its step size falling to zero along a cosine; ``out`` is the file for the weights.

    ``method="pooled"`` puts the clients' rows together, one epoch after another; a method by name (FedAvg, or another that gives
    one model for all) leaves them where they are, an epoch a round. While it trains, ``OUT.unfinished`` is its run directory: the
    same call goes on where one was stopped.
    """
    asked = PretrainOptions.of(settings)
    if not isinstance(model, str) or not models.takes_backbone(model):
        those = ", ".join(name for name in models.names() if models.takes_backbone(name))
        raise InvalidArgument(f"a network that others can start from is one of {those}, not {model!r}")
    opt = SGD(momentum=asked.momentum, weight_decay=asked.weight_decay)
    kind = LEARNER if asked.method == POOLED else find(asked.method)
    learner = kind(lr=Cosine(asked.lr, asked.epochs), epochs=1, opt=opt)
    if not learner.stateless:
        raise InvalidArgument(f"method must be {POOLED} or a method that gives one model for all, not {asked.method!r}")
    rows = pooled(federation) if asked.method == POOLED else federation
    shape = tuple(federation.train.x.shape[1:])
    if not all(p.requires_grad for p in models.build(model, shape, federation.outputs).parameters()):
        raise InvalidArgument(f"pretraining trains the whole network; leave the adapters (or head) out of {model!r}")
    same: dict[str, Any] = {name: getattr(asked, name) for name in ("batch_size", "seed", "backbone")}
    same |= {"rounds": asked.epochs, "weights": "size", "engine": "loop", "callback": callback}
    if out is None:
        return run(learner, rows, model, **same)
    folder = Path(f"{os.fspath(out)}.unfinished")
    try:
        result = run(learner, rows, model, out=folder, resume=True, **same)
    except BadRun as error:
        raise BadRun(f"{error}; remove {folder} to start anew") from error
    files.write(Path(out), weights.pack(result.state_dict(), {"model": model, "data": federation.name}))
    shutil.rmtree(folder)
    return result
