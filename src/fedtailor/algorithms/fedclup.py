"""FedCLUP: personal models around a global one, with the degree of personalisation lam.

What it does
    Minimises the sum of p_i (L_i(w_i) + lam/2 ||g - w_i||^2) over g and all w_i (Problem 2). A client continues from its
    own w_i for K steps, sends lam (g - w_i), the gradient of its envelope at g; the server steps by ``server_lr`` times
    their mean. With ``lam="client"`` every client has a lam_i of its own (``federation.with_facts(lam=...)``): it pulls and
    sends with lam_i, and g comes to rest at the mean of the w_i weighted by p_i lam_i.
Reference
    CLUP, Algorithms 1 (full batch) and 2 (``same_batch=True``: one batch per round).
    With ``steps="theory"`` the steps of Corollary 2; with ``lam="client"`` Problem (19).
Differs from the paper
    Client weights and partial turnout are allowed. ``server_lr`` is 1/lam if not given (the server averages), the paper's
    choice where L is unknown. With mini-batches every step has its own batch unless ``same_batch``. The paper states Problem
    (19) and gives no algorithm: the steps are derived from the objective, whose envelope has the gradient
    sum of p_i lam_i (g - w_i). There ``server_lr`` is 1/(sum of p_i lam_i) if not given, the same in all rounds, so that a
    cohort's mean stays an unbiased gradient; the server must know that one number.
Limits
    lam = 0 is Local; equal lam_i are FedCLUP with that lam; server_lr = 1/lam averages the w_i; lam to infinity (with
    lr = 1/(lam + L)) is one model for all.
When to use
    When accuracy and traffic are to be traded: a small lam needs few rounds, a large one borrows more strength.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend, prox


@dataclass(frozen=True, kw_only=True)
class FedCLUP(Algorithm):
    lam: float | Literal["client"] = param(0.5, ge=0)
    server_lr: float | None = param(None, gt=0)
    same_batch: bool = False

    family = "a personal model tied to the shared one"
    has_theory = True  # Corollary 2: lr, server_lr and steps
    words = {"lam": "client"}
    limits = (Limit({"lam": 0.0, "same_batch": False}, "Local"),)

    def resolve(self, problem):
        """Corollary 2's steps, or the server's step for Problem (19)."""
        if self.lam == "client":
            if self.steps == "theory":
                raise InvalidArgument("steps='theory' is proved for one lam for all; with lam='client' give lr and steps")
            return self._with_server_step(problem.federation, problem.weights), None
        if self.steps != "theory":
            return self, None
        constants = problem.constants(self.opt.weight_decay)
        return replace(self, **problem.rates.fedclup_steps(self.lam, constants.mu, constants.smoothness)._asdict()), constants

    def _with_server_step(self, federation, weights):
        """Set server_lr = 1/(sum of p_i lam_i): the gradient of Problem (19)'s envelope is Lipschitz with less than that sum."""
        lams = federation.facts.get("lam")
        if lams is None:
            return self  # ``degree`` refuses
        if (lams < 0).any():
            client = federation.names[int(np.flatnonzero(lams < 0)[0])]
            raise InvalidArgument(f"the lam of client {client} is negative; give numbers of at least 0 to with_facts(lam=...)")
        if self.server_lr is not None:
            return self
        equal = bool((lams == lams[0]).all())  # their mean may differ from them in the last digit
        mean = float(lams[0] if equal else np.average(lams, weights=federation.train.sizes if weights == "size" else None))
        return replace(self, server_lr=1 / mean if mean else 1.0)

    def work(self):
        return {"train": amount(self.steps, self.epochs, same_batch=self.same_batch)}

    def degree(self, data):
        """This client's lam."""
        if self.lam != "client":
            return self.lam
        if "lam" not in data.get("facts", ()):
            raise InvalidArgument("FedCLUP: lam='client' needs a lam for every client; use federation.with_facts(lam=[...])")
        return data["facts"]["lam"][0]

    def init_server(self, task):
        return {"model": task.init()}, {}

    def init_client(self, task, shared, data):
        return {"model": shared["model"]}

    def client_update(self, task, shared, personal, data, rnd):
        g, lam = shared["model"], self.degree(data)
        w = descend(task.risk, personal["model"], data, self.optimizer(rnd), prox(g, lam))
        return {"gradient": tree.scale_trainable(tree.sub(g, w), lam)}, {"model": w}

    def server_update(self, task, shared, server, upload, rnd):
        gamma = self.server_lr
        if gamma is None:
            if self.lam == "client":
                raise InvalidArgument(
                    "FedCLUP: with lam='client' the server's step is known only once there are data; use ft.run"
                )
            gamma = 1 / self.lam if self.lam else 1.0
        return {"model": tree.move(shared["model"], tree.scale(upload["gradient"], -1.0), gamma)}, server

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)
