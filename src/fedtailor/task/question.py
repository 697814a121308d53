"""A batch that finds out whether a function of (model, batch) is a task's own risk, passed on as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Question(dict[str, Tensor]):
    """``batch`` as a question: ``Task.risk`` answers it with ``reply`` instead of a value. A function that then returns ``reply``
    itself has handed on its arguments, and ``task`` is whose risk it was; other models than ``params`` are kept in ``others``."""

    def __init__(self, batch: Mapping[str, Tensor], params: Any) -> None:
        super().__init__(batch)
        self.params, self.reply, self.task = params, torch.zeros(()), None
        self.others: list[Any] = []

    def answer(self, task: Any, model: Any) -> Tensor:
        if model is not self.params:
            self.others.append(model)
            return torch.zeros(())
        self.task = task
        return self.reply
