"""FedCLUP with a lam that grows: start almost local, share more when the clients stop improving.

What it does
    Rounds as FedCLUP with server_lr = 1/lam. Clients also send the risk, after their local steps, of their personal model on
    their validation rows; when its weighted mean over the cohort has not fallen by ``tolerance`` (relative) for ``patience``
    rounds, the server multiplies lam by ``factor``, up to ``ceiling``. A rise begins the count again, and the mark to fall
    below is then the risk of that round.
Reference
    CLUP, Figure 3 (right) and the text around it; the paper gives no thresholds.
Differs from the paper
    Patience, factor, ceiling and tolerance are ours.
Limits
    With patience beyond the last round it is FedCLUP.
When to use
    When rounds are dear and the right lam is not known: it follows the envelope of the best lam for each target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, param
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend, prox


@dataclass(frozen=True, kw_only=True)
class FedCLUPDynamic(Algorithm):
    lam: float = param(0.01, gt=0)  # at the start
    factor: float = param(2.0, gt=1)
    patience: int = param(3, ge=1)
    ceiling: float = param(10.0, gt=0)
    tolerance: float = param(1e-3, ge=0)

    family = "a personal model tied to the shared one"
    limits = (Limit({"patience": 10**6}, "FedCLUP", exact=False, also={"server_lr": None}),)
    leak = "clients send their loss on validation rows"

    def __post_init__(self):
        super().__post_init__()
        if self.ceiling < self.lam:
            raise InvalidArgument(f"FedCLUPDynamic: ceiling = {self.ceiling:g} is below the first lam = {self.lam:g}; raise it")

    def init_server(self, task):
        model = task.init()
        like = next(iter(model.values()))
        shared = {"model": model, "lam": torch.as_tensor(self.lam, dtype=like.dtype)}
        return shared, {"best": torch.as_tensor(torch.inf, dtype=like.dtype), "wait": torch.zeros((), dtype=like.dtype)}

    def init_client(self, task, shared, data):
        return {"model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        if "val" not in data:
            raise InvalidArgument("FedCLUPDynamic watches validation rows; give the federation val=, or use FedCLUP")
        g, val = shared["model"], data["val"]
        w = descend(task.risk, personal["model"], data, self.optimizer(rnd), prox(g, shared["lam"]))
        risk = task.mean_loss(task.apply(w, val["x"]), val)
        return {"gradient": tree.scale_trainable(tree.sub(g, w), shared["lam"]), "val": risk}, {"model": w}

    def server_update(self, task, shared, server, upload, rnd):
        lam, risk = shared["lam"], upload["val"]
        model = tree.move(shared["model"], tree.scale(upload["gradient"], -1.0), 1 / lam)
        better = risk < server["best"] * (1 - self.tolerance)
        wait = torch.where(better, torch.zeros_like(risk), server["wait"] + 1)
        stalled = wait >= self.patience
        lam = torch.where(stalled, (lam * self.factor).clamp(max=self.ceiling), lam)
        memory = {
            "best": torch.where(better | stalled, risk, server["best"]),
            "wait": torch.where(stalled, torch.zeros_like(wait), wait),
        }
        return {"model": model, "lam": lam}, memory

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)
