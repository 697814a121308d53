"""PerAda: a personal adapter pulled to a shared one, which the server distils from the clients' adapters.

What it does
    The model is what moves: adapters and head on a frozen backbone (``resnet18:adapters``), or any model. A sampled client moves
    its own v by SGD on risk + lam/2 ||v - w||^2 with w as received, and a copy theta of w by plain SGD, which it sends. The
    server starts from the mean of the thetas and takes ``kd_steps`` steps of Adam towards what they say together about unlabelled
    public rows: KL(softmax(mean of their logits / T) || softmax(own logits / T)). A client predicts with v.
Reference
    Xie et al. 2024 (PerAda), Algorithm 1, Personal Obj and Global Obj; kd_steps = 0 is "PerAda without KD".
Differs from the paper
    A client's v starts at the w it first receives, not at w^0, so that a newcomer predicts with the shared model. Batches of
    public rows are cut from a fresh permutation each round. Teachers and student are in evaluation mode: no dropout, running
    statistics, which are averaged and not distilled. Both branches walk through the same batches unless ``personal_steps`` or
    ``personal_epochs`` is given. Several labels per row are distilled label by label. Not in the paper, and off:
    ``teach="probabilities"`` (its Appendix D), ``kd_schedule="cosine"``, ``kd_rounds`` (distil in the first rounds only; the last
    two are its authors' settings), and ``gate``: the share of public rows kept apart, on which the distilled model must be
    closer to the teachers than the mean is, or the mean stays. (The authors' gate takes labels, which the server has not.)
Limits
    kd_steps = 0 is Ditto; with lam = 0 as well, Local. The shared part is then FedAvg's.
When to use
    On a pretrained network with adapters, with unlabelled data like the clients': it trains two adapters and sends one. The
    server sees every upload: not for secure aggregation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, names_of, param
from fedtailor.algorithms.partial import whole
from fedtailor.data import rng
from fedtailor.data.batches import Work, indices, permutations
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend, prox
from fedtailor.server.distill import Teachers, distance, distill, outputs

LOCAL_LIMIT = {"lam": 0.0, "kd_steps": 0, "parts": None, "personal_lr": None, "personal_steps": None, "personal_epochs": None}


@dataclass(frozen=True, kw_only=True)
class PerAda(Algorithm):
    lam: float = param(1.0, ge=0)
    server_lr: float = param(1.0, gt=0)
    personal_lr: float | None = param(None, gt=0)  # lr if not given
    personal_steps: int | None = param(None, ge=1)
    personal_epochs: int | None = param(None, ge=1)
    parts: str | Sequence[str] | None = None  # what is trained, sent and kept: a group or module; None: all that moves
    kd_steps: int = param(50, ge=0)
    kd_lr: float = param(1e-3, gt=0)
    kd_batch: int = param(128, ge=1)
    kd_rounds: int | None = param(None, ge=0)  # distil in the first rounds only
    kd_schedule: Literal["constant", "cosine"] = "constant"
    temperature: float = param(1.0, gt=0)
    teach: Literal["logits", "probabilities"] = "logits"
    gate: float = param(0.0, ge=0, lt=1)

    family = "a personal model tied to the shared one"
    limits = (
        Limit({"kd_steps": 0, "parts": None}, "Ditto"),
        Limit({"kd_steps": 0, "parts": None}, "Ditto", compares="shared"),
        Limit({"kd_rounds": 0, "parts": None}, "Ditto"),
        Limit(LOCAL_LIMIT, "Local"),
        Limit({"kd_steps": 0, "parts": None}, "FedAvg", compares="shared"),
    )

    def work(self):
        train = super().work()
        if self.personal_steps is None and self.personal_epochs is None:
            return train
        return {**train, "personal": amount(self.personal_steps, self.personal_epochs)}

    def mine(self, task):
        """Names of the parameters and buffers that are trained, sent and kept."""
        names = frozenset(task.names) if self.parts is None else names_of(task, self.parts)
        if not names:
            raise InvalidArgument(f"PerAda: parts={self.parts!r} leaves nothing to train; name a part that is not frozen")
        return names

    def rest(self, task):
        """Return the parameters that do not move, with their start values; they are never sent."""
        return {} if self.parts is None else tree.drop(task.init(), self.mine(task))

    def distills(self, rnd=None):
        return (
            self.kd_steps > 0 and self.kd_rounds != 0 and (rnd is None or self.kd_rounds is None or rnd.number < self.kd_rounds)
        )

    def init_server(self, task):
        if self.distills() and task.public is None:
            raise InvalidArgument(
                "PerAda needs public rows to distil on; give the federation public= (--public cifar100), or set kd_steps=0"
            )
        part = tree.pick(task.init(), self.mine(task))
        return {"model": part}, {"distance": next(iter(part.values())).new_zeros(2)} if self.distills() else {}

    def init_client(self, task, shared, data):
        return {"model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        w, mine, rest = shared["model"], self.mine(task), self.rest(task)
        frozen = dict.fromkeys(rest, 0.0)
        theta = descend(task.risk, whole(task, rest, w), data, self.optimizer(rnd), rates=frozen)
        personal_data = data["personal"] if "personal" in self.work() else data
        opt = self.optimizer(rnd, self.personal_lr)
        v = descend(task.risk, whole(task, rest, personal["model"]), personal_data, opt, prox(w, self.lam), rates=frozen)
        return {"delta": tree.sub(tree.pick(theta, mine), w)}, {"model": tree.pick(v, mine)}

    def reducer(self, task, shared, rnd):
        if not self.distills(rnd):
            return super().reducer(task, shared, rnd)
        rest, (rows, _, _) = self.rest(task), self.lessons(task, rnd)

        def model(upload):
            return whole(task, rest, tree.add(shared["model"], upload["delta"]))

        return Teachers(task, task.public[rows], model, self.teach, self.temperature)

    def lessons(self, task, rnd):
        """Return (the public rows of this round; which of them each step uses, [steps, batch]; which of them judge the
        result)."""
        count = len(task.public)
        held_out = min(round(self.gate * count), count - 1)
        key = rng.mix(rnd.seed, rng.purpose("gate"), [0])
        order = permutations(key, np.array([count]), 1)[0, 0] if held_out else np.arange(count)
        key = rng.mix(rnd.seed, rng.purpose("public"), rnd.number, [0])
        index = indices(key, np.array([count - held_out]), Work(steps=self.kd_steps), self.kd_batch)[0][0]
        drawn = order[held_out:][index]
        rows = np.unique(drawn[index >= 0])
        positions = np.where(index >= 0, np.searchsorted(rows, drawn), -1)
        return torch.from_numpy(np.concatenate([rows, order[:held_out]])), positions, slice(len(rows), None)

    def server_update(self, task, shared, server, upload, rnd):
        w = tree.move(shared["model"], upload["delta"], self.server_lr)
        if not self.distills(rnd):
            return {"model": w}, server
        rest, (rows, index, gate) = self.rest(task), self.lessons(task, rnd)
        x, teachers = task.public[rows], upload["teachers"]
        start, frozen = whole(task, rest, w), dict.fromkeys(rest, 0.0)
        end = distill(task, start, x, teachers["target"], index, self.kd_lr, self.temperature, self.kd_schedule, frozen)
        before, after = (outputs(task, model, x) for model in (start, end))
        if self.gate:
            old, new = (task.kind.gap(z[gate], teachers["target"][gate], self.temperature).mean() for z in (before, after))
            end, after = tree.where(new < old, {"model": end, "outputs": after}, {"model": start, "outputs": before}).values()
        distances = [distance(task.kind.soft(z), teachers["probabilities"]) for z in (before, after)]
        return {"model": tree.pick(end, shared["model"])}, {"distance": torch.stack(distances)}

    def measures(self, server, rnd):
        """Return the ensemble distillation distance (Theorem 1) on this round's public rows: of the mean, and after
        distillation."""
        if not self.distills(rnd):
            return {}
        mean, distilled = server["distance"].tolist()
        return {"ensemble_distance_mean": mean, "ensemble_distance": distilled}

    def predict(self, task, shared, personal, x):
        return task.apply(whole(task, self.rest(task), personal["model"]), x)
