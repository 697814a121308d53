"""A method on an engine, one round at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.engine.base import Engine
from fedtailor.engine.setup import build_task, cohort_of, make_plan
from fedtailor.runs.store import Store


class Player:
    """Calling it plays the next round."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        model: str | nn.Module,
        batch: int | None,
        cohort: int,
        engine: Any,
        **options: Any,
    ) -> None:
        task = build_task(model, federation, 0, torch.float32, bias=True)
        self.plan = make_plan(algorithm, task, federation, batch, 0, "uniform")
        self.engine: Engine = engine(self.plan, **options)
        self.shared, self.server = algorithm.init_server(task)
        self.store, self.cohort, self.number = Store(len(federation)), cohort, 0

    def __call__(self) -> None:
        ids = cohort_of(self.plan.federation, self.plan.algorithm, self.cohort, 0, self.number)
        rnd = self.plan.round(self.number, 10**6, np.asarray(ids))
        upload = self.engine.round(self.shared, ids, rnd, self.store)
        self.shared, self.server = self.plan.algorithm.server_update(self.plan.task, self.shared, self.server, upload, rnd)
        self.number += 1
