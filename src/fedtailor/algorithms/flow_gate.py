"""FlowGate: every row is answered by the shared model, by the client's own or by both, as their confidences tell.

What it does
    w is trained as by FedAvg. Before it predicts, a client fine-tunes a copy v of w, as by FedAvgFT (``finetune_epochs`` or
    ``finetune_steps``, ``finetune_lr``). In the place of Flow's router stand weights that all clients share and that read ten
    numbers of a row (``evidence``): both models' largest probabilities, margins and entropies, whether they agree, each one's
    probability of the other's class, and a one.
    ``combine="pool"``: the scores of the classes are z = a log p_w + b log p_v + d log s, where s are the client's own shares of
    the classes in its training rows, (n_c + 1/2) / (n + K/2), and a, b, d are linear in the ten numbers (30 weights theta). They
    start at the geometric mean of both models (a = b = 1/2, d = 0) and are fitted to the log loss, which is convex in theta.
    ``combine="gate"`` chooses: logistic regression on the ten numbers, q = P(w is right | exactly one of them is), fitted on rows
    where exactly one is. The answer is that of w where q > 1/2 and of v where q < 1/2; ``inference="soft"`` mixes the
    probabilities by q. While the gate knows nothing (no round yet, no validation rows) both are averaged.
    Both are fitted on rows that neither model was trained on: from round ``warmup`` on a client of a round also makes v from w as
    received, and sends the gradient and the Hessian of the loss on its validation rows (495 numbers, of a gate 65; no row and no
    share of a class leaves). The server takes Newton's step on the mean over clients plus ridge/2 |theta - start|^2, whose
    quadratics it remembers over rounds with weights ``memory``^age.
    ``combine="average"`` always averages; ``combine="stack"`` takes a weight of w for each client, of eleven from 0 to 1 that
    with the least loss on its validation rows. They have the same w and v: yardsticks.
Reference
    A variant of FLOW (Panchal et al. 2023), whose router reads the row alone; pool and gate are ours. Newton's steps on sums of
    clients' gradients and Hessians: federated iteratively reweighted least squares.
Differs from the paper
    FLOW's router is a network on the raw row, trained through the mixture on training rows. Here w learns from its own risk on
    all rows, v is fine-tuned on all rows, and the two are told apart by what they answer. FLOW does not know shares of classes.
Limits
    The shared model is FedAvg's. With memory = 0, all clients and models that stand still, the weights are those of the least
    penalised loss of all clients' rows together.
When to use
    In classification, where clients have validation rows, above all where their shares of the classes differ: on EMNIST the pool
    was above the better of FedAvgFT and averaging, and the gate tied it (docs/results/routing.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.algorithms.prototypes import count_labels
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend

NUMBERS = 10  # of a row: nine that tell, and a one
GRID = 11
LOOK, LOOK_AT_THE_END = "look", "personalize:look"  # every training row once, to count labels


@dataclass(frozen=True, kw_only=True)
class FlowGate(Algorithm):
    server_lr: float = param(1.0, gt=0)
    finetune_epochs: int | None = param(None, ge=1)  # one epoch if neither is given
    finetune_steps: int | None = param(None, ge=1)
    finetune_lr: float | None = param(None, gt=0)  # lr if not given
    combine: Literal["pool", "gate", "average", "stack"] = "pool"
    inference: Literal["hard", "soft"] = "hard"
    ridge: float = param(0.01, gt=0)
    memory: float = param(0.98, ge=0, lt=1)
    warmup: int = param(0, ge=0)  # rounds before the gate learns

    family = "layers chosen for each row"
    limits = (Limit({"combine": "average"}, "FedAvg", compares="shared"),)
    leak = "the gate is fitted to validation rows by plain gradients"

    def stages(self):
        return sorted({0, self.warmup})

    @property
    def learns(self):
        """Whether there is something to fit on validation rows of all clients."""
        return self.combine in ("gate", "pool")

    def work(self):
        tuning = amount(self.finetune_steps, self.finetune_epochs)
        looks = {LOOK: amount(None, 1), LOOK_AT_THE_END: amount(None, 1)} if self.combine == "pool" else {}
        return {**super().work(), **({"local": tuning} if self.learns else {}), "personalize": tuning, **looks}

    def beginning(self, like):
        """The gate's weights before it has seen a row."""
        if self.combine == "gate":
            return like.new_zeros(NUMBERS)
        a = b = torch.cat([like.new_zeros(NUMBERS - 1), like.new_full((1,), 0.5)])
        return torch.cat([a, b, like.new_zeros(NUMBERS)])

    def init_server(self, task):
        if not task.kind.softmax:
            raise InvalidArgument("FlowGate chooses between two classifiers; for other targets use Flow or FedAvgFT")
        model = task.init()
        if not self.learns:
            return {"model": model}, {}
        gate = self.beginning(next(iter(model.values())))
        past = {"hessian": torch.zeros_like(gate[:, None] * gate), "target": torch.zeros_like(gate), "mass": gate.new_zeros(())}
        return {"model": model, "gate": gate}, past

    def client_update(self, task, shared, personal, data, rnd):
        model = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        upload = {"delta": tree.sub(model, shared["model"])}
        if not self.learns:
            return upload, personal
        return {**upload, "gate": self.statistics(task, shared, data, rnd)}, personal

    def statistics(self, task, shared, data, rnd):
        """The gradient and the Hessian of the gate's losses on validation rows, at the weights received."""
        theta = shared["gate"]
        nothing = {"gradient": torch.zeros_like(theta), "hessian": half(torch.zeros_like(theta[:, None] * theta))}
        if rnd.number < self.warmup or "val" not in data:
            return nothing
        local = descend(task.risk, shared["model"], data["local"], self.optimizer(rnd, self.finetune_lr))
        y, mask = data["val"]["y"], data["val"]["mask"]
        if y.dim() > 1:
            raise InvalidArgument("FlowGate needs one label per row, not one per position; use another method")
        if not len(y):
            return nothing
        ours, theirs = (task.apply(m, data["val"]["x"]).log_softmax(-1) for m in (shared["model"], local))
        if self.combine == "pool":
            return pool_statistics(theta, ours, theirs, log_shares(ours.new_zeros(ours.shape[-1]), data[LOOK]), y, mask)
        ours, theirs = ours.exp(), theirs.exp()
        w_right, v_right = ours.argmax(-1) == y, theirs.argmax(-1) == y
        seen, weight = evidence(ours, theirs), mask * (w_right != v_right)
        q = (seen @ theta).sigmoid()
        gradient = seen.T @ (weight * (q - w_right.to(q)))
        return {"gradient": gradient, "hessian": half(seen.T @ (seen * (weight * q * (1 - q)).unsqueeze(-1)))}

    def server_update(self, task, shared, server, upload, rnd):
        new = {"model": tree.move(shared["model"], upload["delta"], self.server_lr)}
        if not self.learns:
            return new, server
        if rnd.number < self.warmup:
            return {**new, "gate": shared["gate"]}, server
        gradient, hessian = upload["gate"]["gradient"], whole(upload["gate"]["hessian"], len(shared["gate"]))
        now = {"hessian": hessian, "target": hessian @ shared["gate"] - gradient, "mass": torch.ones_like(server["mass"])}
        past = {name: self.memory * server[name] + now[name] for name in now}
        ridge = self.ridge * torch.eye(len(gradient), dtype=gradient.dtype, device=gradient.device)
        target = past["target"] / past["mass"] + self.ridge * self.beginning(gradient)
        return {**new, "gate": torch.linalg.solve(past["hessian"] / past["mass"] + ridge, target)}, past

    def personalize(self, task, shared, personal, data):
        local = {"local": descend(task.risk, shared["model"], data, self.optimizer(lr=self.finetune_lr))}
        if self.combine == "pool":
            like = next(iter(shared["model"].values()))
            return {**local, "shares": log_shares(like.new_zeros(task.classes), data[LOOK_AT_THE_END])}
        if self.combine != "stack":
            return local
        like = next(iter(shared["model"].values()))
        grid = torch.linspace(0, 1, GRID, dtype=like.dtype, device=like.device)
        if "val" not in data or not data["val"]["y"].numel():
            return {**local, "weight": grid[GRID // 2]}
        y, mask = data["val"]["y"], data["val"]["mask"]
        models = (shared["model"], local["local"])
        ours, theirs = (task.apply(m, data["val"]["x"]).log_softmax(-1).gather(-1, y[:, None])[:, 0] for m in models)
        losses = torch.stack([-(mixed(ours, theirs, a) * mask).sum() for a in grid])
        return {**local, "weight": grid[losses.argmin()]}

    def predict(self, task, shared, personal, x):
        if "local" not in personal:
            return task.apply(shared["model"], x)
        ours, theirs = (task.apply(m, x).log_softmax(-1) for m in (shared["model"], personal["local"]))
        if self.combine == "pool":
            logs = columns(ours, theirs, personal["shares"])
            return pooled(shared["gate"], evidence(ours.exp(), theirs.exp()), logs).log_softmax(-1)
        return mixed(ours, theirs, self.share(shared, personal, ours.exp(), theirs.exp()).unsqueeze(-1))

    def share(self, shared, personal, ours, theirs):
        """What w's probabilities weigh in the answer to each row."""
        if self.combine == "average":
            return torch.full_like(ours[..., 0], 0.5)
        if self.combine == "stack":
            return personal["weight"].expand(ours.shape[:-1])
        q = (evidence(ours, theirs) @ shared["gate"]).sigmoid()
        return q if self.inference == "soft" else (torch.sign(q - 0.5) + 1) / 2


def mixed(ours, theirs, q):
    """The logarithm of q e^ours + (1 - q) e^theirs; exact where q is 0 or 1."""
    return torch.logaddexp(ours + q.log(), theirs + (1 - q).log())


# -- the pool: three columns of logarithms per row, weighed by what tells ---------------------------------------------------
def columns(ours, theirs, shares):
    """Return what the pool weighs, [rows, classes, 3]: the logarithms of both models' probabilities and of a client's shares."""
    return torch.stack([ours, theirs, shares.expand(ours.shape)], -1)


def pooled(theta, seen, logs):
    """Return the scores of the classes, [rows, classes]."""
    return (logs @ (seen @ theta.unflatten(0, (3, NUMBERS)).T).unsqueeze(-1))[..., 0]


def pool_statistics(theta, ours, theirs, shares, y, mask):
    """The gradient and the Hessian of the pool's log loss, summed over rows."""
    seen, logs = evidence(ours.exp(), theirs.exp()), columns(ours, theirs, shares)
    p = pooled(theta, seen, logs).softmax(-1).unsqueeze(-1)
    mean = (p * logs).sum(-2)
    apart = mean - logs.take_along_dim(y[:, None, None], -2)[:, 0]
    around = logs - mean.unsqueeze(-2)
    spread = (p * around).mT @ around  # [rows, 3, 3]
    gradient = torch.einsum("n,nj,ne->je", mask, apart, seen).flatten()
    hessian = torch.einsum("n,nij,ne,nf->iejf", mask, spread, seen, seen).flatten(2).flatten(0, 1)
    return {"gradient": gradient, "hessian": half(hessian)}


def log_shares(zeros, data):
    """The logarithms of a client's shares of the classes, half a row added to each class."""
    counts = count_labels(zeros, data) + 0.5
    return counts.log() - counts.sum().log()


def half(matrix):
    """Return a symmetric matrix's upper half, row after row, which is what travels."""
    return torch.cat([row[i:] for i, row in enumerate(matrix)])


def whole(upper, size):
    """Return the symmetric matrix of an upper half."""
    above = torch.stack([F.pad(row, (size - len(row), 0)) for row in upper.split([size - i for i in range(size)])])
    return above + above.triu(1).T


def evidence(ours, theirs):
    """What tells which of two models is right, of each row, from their probabilities [rows, classes]: nine numbers from 0 to 1
    and a one."""
    (p, first), (r, second) = ours.max(-1), theirs.max(-1)
    margins = [(top[..., 0] - top[..., 1]) for top in (m.topk(2, -1).values for m in (ours, theirs))]
    classes = torch.tensor(float(ours.shape[-1]), dtype=ours.dtype, device=ours.device)
    entropies = [-torch.special.xlogy(m, m).sum(-1) / classes.log() for m in (ours, theirs)]
    crossed = [m.gather(-1, at.unsqueeze(-1))[..., 0] for m, at in ((ours, second), (theirs, first))]
    return torch.stack([p, r, *margins, *entropies, (first == second).to(p), *crossed, torch.ones_like(p)], -1)
