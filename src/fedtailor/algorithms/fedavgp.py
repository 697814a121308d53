"""FedAvg-P: partial personalisation with outer steps for both parts.

What it does
    K simultaneous SGD steps on (u_i, v_i) with steps ``lr`` and ``personal_lr``; then
    v_i <- (1 - personal_server_lr) v_i + personal_server_lr v_{i,K}, and u moves by ``server_lr`` times the mean change.
Reference
    PARTIAL, Algorithm 3.1 (its listing is missing from the text; the rules are those of section 3.2.1 and of Algorithm 4.1).
    With ``lr="theory"`` the steps of Theorem 3.7, Corollary 3.8 and Theorem 3.11.
Differs from the paper
    Weights may be by size (the paper's mean is plain).
Limits
    Both outer steps 1: FedSim. No personal part: FedAvg.
When to use
    When convergence matters: large outer steps with small local ones are what the theorems ask for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedtailor import tree
from fedtailor.algorithms.base import Limit, param
from fedtailor.algorithms.partial import Partial, theory, whole
from fedtailor.errors import InvalidArgument
from fedtailor.local import Schedule, descend


@dataclass(frozen=True, kw_only=True)
class FedAvgP(Partial):
    personal_lr: float | None = param(None, gt=0)  # lr if not given
    server_lr: float = param(1.0, gt=0)
    personal_server_lr: float = param(1.0, gt=0)

    needs_both = False
    words = {"lr": "theory"}  # all four step sizes
    limits = (
        Limit({"server_lr": 1.0, "personal_server_lr": 1.0, "personal_lr": None}, "FedSim", exact=False),
        Limit({"personal": ()}, "FedAvg"),
        Limit({"personal": ("head", "body"), "personal_lr": None, "personal_server_lr": 1.0}, "Local", exact=False),
    )

    def __post_init__(self):
        super().__post_init__()
        if self.personal_lr is not None and isinstance(self.lr, Schedule):
            raise InvalidArgument(
                f"{type(self).__name__}: with a schedule for lr leave out personal_lr (both follow the schedule)"
            )

    def resolve(self, problem):
        """Theorem 3.11 where all take part, else Corollary 3.8 (Theorem 3.7 where b^2 has no bound)."""
        if self.lr != "theory":
            return self, None
        split, steps, noise = theory(self, problem)
        m, n = problem.cohort, len(problem.federation)
        if m == n:
            step_sizes = problem.partial.fedavgp_full(split.L, steps, n, problem.rounds, split.gap, split.start2, **noise)
        elif math.isinf(split.b2):
            step_sizes = problem.partial.fedavgp_partial(split.L, steps, m, n)
        else:
            step_sizes = problem.partial.fedavgp_partial(split.L, steps, m, n, problem.rounds, split.gap, b2=split.b2, **noise)
        return replace(self, **step_sizes.options), None

    def client_update(self, task, shared, personal, data, rnd):
        mine, u, v = self.mine(task), shared["model"], personal["model"]
        rates = dict.fromkeys(mine, self.personal_lr / self.lr) if self.personal_lr else None  # type: ignore[operator]
        model = descend(task.risk, whole(task, u, v), data, self.optimizer(rnd), rates=rates)
        moved = tree.sub(tree.pick(model, mine), v)
        return {"delta": tree.sub(tree.drop(model, mine), u)}, {"model": tree.move(v, moved, self.personal_server_lr)}

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.move(shared["model"], upload["delta"], self.server_lr)}, server
