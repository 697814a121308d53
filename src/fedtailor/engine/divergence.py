"""Divergence: which loss counts as absurd, and how a run that ends there is refused.

A step size that is too long multiplies the error in every step, so a run diverges long before its numbers stop being finite.
It is called diverged when its clients' loss on their training rows, mean over clients, is above ``ABSURD`` times the loss of
predicting zero. Training rows are looked at only where the evaluated rows are beyond that limit, because an outlier among them
says nothing about training. Private methods are exempt: their steps are clipped, and their training rows are not to be looked at.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.algorithms.base import Round
from fedtailor.engine.base import Engine, Sent, step_size
from fedtailor.errors import Diverged
from fedtailor.metrics.client import measure
from fedtailor.runs.store import Store

ABSURD = 1e6  # times the loss of predicting zero
SAMPLE = 1000  # training rows whose labels that loss is computed from


def check_loss(engine: Engine, sent: Sent, store: Store, losses: NDArray[np.float64], rnd: Round) -> None:
    """Raise ``Diverged`` if the clients' personal models are absurd; ``losses`` are those on the evaluated rows."""
    plan = engine.plan
    limit = ABSURD * loss_of_zero(engine)
    if bool((losses <= limit).all()) or limit == 0 or plan.algorithm.opt.privacy is not None:
        return
    trained = np.full(len(plan.federation), np.nan)
    for ids, own, _, y, mask, _ in engine.predictions(sent, np.arange(len(trained)), store, plan.federation.train):
        trained[ids] = measure(plan.task, own, None, y, mask, final=False)["loss_personal"]
    loss = float(trained.mean())
    if not loss <= limit:
        names = [plan.federation.names[int(i)] for i in np.flatnonzero(~(trained <= limit))]
        fault = f"is {loss:.2g}, where predicting zero has {limit / ABSURD:.2g}" if np.isfinite(loss) else "is not finite"
        raise Diverged(rnd.number, names, "the loss", step_size(plan.algorithm, rnd), fault)


@torch.no_grad()
def loss_of_zero(engine: Engine) -> float:
    """Return the mean loss of predicting zero (all classes alike) on a sample of the training rows; 0 where it says nothing:
    it is not finite, or negative, as a loss of the user's own may be."""
    plan = engine.plan.on_host
    task, rows = plan.task, len(plan.federation.train.y)
    _, y = engine.rows(plan.federation.train, np.arange(0, rows, max(1, rows // SAMPLE)))
    logits = task.apply(task.init(), plan.federation.few(1)[0].clone())
    loss = float(task.mean_loss(logits.new_zeros(len(y), *logits.shape[1:]), {"y": y}))
    return loss if np.isfinite(loss) and loss > 0 else 0.0
