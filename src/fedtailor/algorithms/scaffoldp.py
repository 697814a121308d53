"""Scaffold-P: partial personalisation with control variates on the shared part.

What it does
    As FedAvg-P, but the steps on u use gradient - c_i + c. After K steps c_i <- c_i - c + (u - u_{i,K})/(K lr), and
    c moves by the sum of the changes over *all* n clients. Round 0 is a roll call: every client sends the mean of its stochastic
    gradients at the start as its first c_i; nothing is trained.
Reference
    PARTIAL, Algorithm 4.1; with ``lr="theory"`` the steps of Theorem 4.5 and Corollary 4.6.
Differs from the paper
    The roll call takes a round of its own. ``first="zeros"`` leaves it out (c_i = 0), as Scaffold does.
Limits
    No personal part and first = "zeros": Scaffold.
When to use
    When clients differ much and local work is long: its floor does not rise with K under partial turnout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedtailor import tree
from fedtailor.algorithms.base import Limit, param
from fedtailor.algorithms.partial import Partial, theory, whole
from fedtailor.algorithms.scaffold import plain_sgd, updated_control
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend, gradient, linear


@dataclass(frozen=True, kw_only=True)
class ScaffoldP(Partial):
    personal_lr: float | None = param(None, gt=0)  # lr if not given
    server_lr: float = param(1.0, gt=0)
    personal_server_lr: float = param(1.0, gt=0)
    first: str = "gradients"  # or "zeros"

    needs_both = False
    words = {"lr": "theory"}  # all four step sizes
    limits = (Limit({"personal": (), "first": "zeros"}, "Scaffold", compares="shared"),)

    def __post_init__(self):
        super().__post_init__()
        plain_sgd(self)
        if self.first not in ("gradients", "zeros"):
            raise InvalidArgument(f"ScaffoldP: first must be 'gradients' or 'zeros', not {self.first!r}")

    @property
    def roll_call(self):  # type: ignore[override]
        return self.first == "gradients"

    @property
    def leak(self):  # type: ignore[override]
        return "its first round sends plain gradients (first='zeros' does not)" if self.first == "gradients" else None

    def resolve(self, problem):
        """Corollary 4.6, which is Theorem 4.5 without noise; round 0 is the roll call."""
        if self.lr != "theory":
            return self, None
        split, steps, noise = theory(self, problem)
        if self.first != "gradients":
            raise InvalidArgument("ScaffoldP: lr='theory' is proved for first='gradients'; leave out first")
        clients = problem.cohort, len(problem.federation)
        step_sizes = problem.partial.scaffoldp_partial(split.L, steps, *clients, max(1, problem.rounds - 1), split.gap, **noise)
        return replace(self, **step_sizes.options), None

    def init_server(self, task):
        u = tree.drop(task.init(), self.mine(task))
        return {"model": u, "control": tree.zeros(tree.trainable(u))}, {}

    def init_client(self, task, shared, data):
        return {"model": tree.pick(task.init(), self.mine(task)), "control": tree.zeros(shared["control"])}

    def client_update(self, task, shared, personal, data, rnd):
        mine, u, v = self.mine(task), shared["model"], personal["model"]
        c, ci = shared["control"], personal["control"]
        if self.roll_call and rnd.number == 0:
            new = tree.pick(gradient(task.risk, whole(task, u, v), data), c)
            return {"delta": tree.zeros(u), "control": tree.sub(new, ci)}, {"model": v, "control": new}
        rates = dict.fromkeys(mine, self.personal_lr / self.lr) if self.personal_lr else None  # type: ignore[operator]
        model = descend(task.risk, whole(task, u, v), data, self.optimizer(rnd), linear(tree.sub(c, ci)), rates)
        new = updated_control(u, tree.drop(model, mine), c, ci, data, self.lr)
        moved = tree.sub(tree.pick(model, mine), v)
        upload = {"delta": tree.sub(tree.drop(model, mine), u), "control": tree.sub(new, ci)}
        return upload, {"model": tree.move(v, moved, self.personal_server_lr), "control": new}

    def server_update(self, task, shared, server, upload, rnd):
        model = tree.move(shared["model"], upload["delta"], self.server_lr)
        return {"model": model, "control": tree.add(shared["control"], upload["control"], rnd.turnout)}, server
