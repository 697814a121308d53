"""FedBABU: the body is learned together, the head only at the end.

What it does
    In the rounds the head stays at its random start, the same for all; the body is trained and averaged. Before predicting, a
    client fine-tunes the whole model.
Reference
    Oh et al. 2022 (FedBABU).
Differs from the paper
    Weighted as asked (the authors' mean is plain). The head is out of every step, decay and momentum included.
Limits
    The shared model, head untrained, is what a newcomer has; its accuracy says little.
When to use
    When clients will fine-tune anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import amount, param
from fedtailor.algorithms.partial import Partial, whole
from fedtailor.local import descend


@dataclass(frozen=True, kw_only=True)
class FedBABU(Partial):
    finetune_epochs: int | None = param(None, ge=0)  # 5 if neither is given
    finetune_steps: int | None = param(None, ge=0)
    finetune_lr: float | None = param(None, gt=0)  # lr if not given

    def work(self):
        return {**super().work(), "personalize": amount(self.finetune_steps, self.finetune_epochs, default=5)}

    def client_update(self, task, shared, personal, data, rnd):
        u, head = shared["model"], personal["model"]
        model = descend(task.risk, whole(task, u, head), data, self.optimizer(rnd), rates=dict.fromkeys(head, 0.0))
        return {"delta": tree.sub(tree.drop(model, self.mine(task)), u)}, personal

    def personalize(self, task, shared, personal, data):
        start = whole(task, shared["model"], personal["model"])
        return {"model": descend(task.risk, start, data, self.optimizer(lr=self.finetune_lr))}
