"""FedAvg with fine-tuning: one model for all, then some local steps before predicting.

What it does
    Rounds as FedAvg. Before it predicts, a client fine-tunes a copy of the shared model on its training data; the copy is
    never sent and never kept.
Reference
    MINIMAX, Figure 1 and Appendix D (FedAvg + fine-tuning, 15 epochs); FLOW, baseline FedAvgFT.
Differs from the paper
    Nothing known. With a schedule for ``lr``, fine-tuning uses its first value unless ``finetune_lr`` is given.
Limits
    The shared model is FedAvg's.
When to use
    As the first thing to try: it follows the better of FedAvg and Local over all R in MINIMAX's experiment.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.local import descend


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(Algorithm):
    server_lr: float = param(1.0, gt=0)
    finetune_epochs: int | None = param(None, ge=1)  # one epoch if neither is given
    finetune_steps: int | None = param(None, ge=1)
    finetune_lr: float | None = param(None, gt=0)  # lr if not given

    family = "the shared model, adapted"
    limits = (Limit({}, "FedAvg", compares="shared"),)

    def work(self):
        return {**super().work(), "personalize": amount(self.finetune_steps, self.finetune_epochs)}

    def init_server(self, task):
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        model = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"delta": tree.sub(model, shared["model"])}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.move(shared["model"], upload["delta"], self.server_lr)}, server

    def personalize(self, task, shared, personal, data):
        return {"model": descend(task.risk, shared["model"], data, self.optimizer(lr=self.finetune_lr))}

    def predict(self, task, shared, personal, x):
        return task.apply(personal.get("model", shared["model"]), x)
