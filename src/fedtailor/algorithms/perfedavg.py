"""Per-FedAvg: a shared model that is good after one step of fine-tuning.

What it does
    Each local step takes w' = w - inner_lr g(w) and moves w by -lr times the meta-gradient (I - inner_lr H(w)) g(w'): without the
    Hessian (``hessian="first-order"``) or with its product by a central difference (``"free"``). Before predicting, a client
    takes steps of ``inner_lr`` on its training data.
Reference
    Fallah et al. 2020 (Per-FedAvg): the meta-gradient and its two approximations, from memory.
Differs from the paper
    One batch serves all gradients of a step (the paper draws independent ones).
Limits
    inner_lr to 0 is FedAvg.
When to use
    When clients will take exactly one or few steps before use.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, amount, param
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend, gradient_on, scan


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Algorithm):
    inner_lr: float = param(0.05, gt=0)
    hessian: str = "first-order"  # or "free"
    delta: float = param(1e-3, gt=0)  # half-width of the central difference
    server_lr: float = param(1.0, gt=0)
    finetune_steps: int | None = param(None, ge=0)  # one step if neither is given
    finetune_epochs: int | None = param(None, ge=0)

    family = "the shared model, adapted"
    leak = "it steps by plain gradients taken one step ahead"

    def __post_init__(self):
        super().__post_init__()
        if self.hessian not in ("first-order", "free"):
            raise InvalidArgument(f"PerFedAvg: hessian must be 'first-order' or 'free', not {self.hessian!r}")

    def work(self):
        return {**super().work(), "personalize": amount(self.finetune_steps, self.finetune_epochs, default=amount(1, None))}

    def init_server(self, task):
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        lr = self.optimizer(rnd).lr

        def step(w, batch):
            eta = lr(batch["step"]) if callable(lr) else lr
            ahead = tree.move(w, tree.scale(gradient_on(task.risk, w, batch), -1.0), self.inner_lr)
            outer = gradient_on(task.risk, ahead, batch)
            if self.hessian == "free":
                up, down = (gradient_on(task.risk, shifted(w, outer, sign * self.delta), batch) for sign in (1, -1))
                curved = tree.scale(tree.sub(up, down), self.inner_lr / (2 * self.delta))
                outer = {**outer, **tree.sub(tree.trainable(outer), tree.trainable(curved))}
            return tree.move(w, tree.scale(outer, -1.0), eta)

        w = scan(step, shared["model"], data)
        return {"delta": tree.sub(w, shared["model"])}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.move(shared["model"], upload["delta"], self.server_lr)}, server

    def personalize(self, task, shared, personal, data):
        return {"model": descend(task.risk, shared["model"], data, self.optimizer(lr=self.inner_lr))}

    def predict(self, task, shared, personal, x):
        return task.apply(personal.get("model", shared["model"]), x)


def shifted(w, direction, size):
    """Return the parameters moved along a direction, the buffers as they are."""
    return {**w, **tree.add(tree.trainable(w), tree.trainable(direction), size)}
