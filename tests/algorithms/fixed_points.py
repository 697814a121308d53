"""Where methods must end: problems whose minimisers are known in closed form, and who reaches them how closely.

``tests/algorithms/test_limits.py`` runs every line of ``TABLE``; docs/methods.md takes its column from the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

import fedtailor as ft
from fedtailor.algorithms import Algorithm
from fedtailor.local import Schedule

LINEAR = {"bias": False, "dtype": "float64", "evaluate_every": 0}
PULLS = (0.05, 0.5, 5.0)


class Known(NamedTuple):
    """Clients' least squares, and the minimisers: of the shared model and of every client (None: nothing is claimed)."""

    federation: ft.Federation
    shared: np.ndarray | None
    personal: list[np.ndarray] | None


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """A method that reaches a known minimiser, all entries to ``tolerance``, in so many rounds; ``words`` say which one."""

    method: Algorithm
    words: str
    known: Callable[[], Known]
    rounds: int
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-8
    slow: bool = False

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{type(self.method).__name__} to {self.words} of {self.known.__name__}{f' with {settings}' if settings else ''}"

    def apart(self) -> float:
        """The largest distance that is left, read off the predictions at the unit vectors."""
        known = self.known()
        run = ft.run(self.method, known.federation, rounds=self.rounds, **LINEAR, **self.options)
        units = torch.eye(known.federation.train.x.shape[1], dtype=torch.float64)
        pairs = [] if known.shared is None else [(run.predict_global(units), known.shared)]
        pairs += [] if known.personal is None else [(run.predict(i, units), w) for i, w in enumerate(known.personal)]
        return float(np.max([np.abs(ours.numpy().ravel() - theirs).max() for ours, theirs in pairs]))


# -- problems ----------------------------------------------------------------------------------------------------------
def clients_of(federation: ft.Federation) -> list[tuple[np.ndarray, np.ndarray]]:
    return [tuple(t.numpy() for t in federation.train.client(i)) for i in range(len(federation))]


def problem_2(clients, lam, weights):
    """Minimiser of sum p_i (1/(2n) |X_i w_i - y_i|^2 + lam/2 |g - w_i|^2), by the normal equations.

    With H_i = X'X/n and b_i = X'y/n: w_i = (H_i + lam)^-1 (b_i + lam g), and g = sum p_i w_i."""
    d = clients[0][0].shape[1]
    inverses = [np.linalg.inv(x.T @ x / len(y) + lam * np.eye(d)) for x, y in clients]
    rights = [x.T @ y / len(y) for x, y in clients]
    left = np.eye(d) - lam * sum(p * a for p, a in zip(weights, inverses, strict=True))
    g = np.linalg.solve(left, sum(p * a @ b for p, a, b in zip(weights, inverses, rights, strict=True)))
    return g, [a @ (b + lam * g) for a, b in zip(inverses, rights, strict=True)]


@cache
def least_squares() -> ft.Federation:
    """Six clients, Hessians with eigenvalues from 1 to 8."""
    return ft.Federation.load("clup-regression", clients=6, d=5, rows=20, kappa=8.0, R=1.5)


def pulled(lam: float) -> Callable[[], Known]:
    """Problem (2) on ``least_squares``."""

    def known() -> Known:
        federation = least_squares()
        return Known(federation, *problem_2(clients_of(federation), lam, np.full(6, 1 / 6)))

    known.__name__ = f"six clients, lam={lam}"
    return known


def weighed(weights: str) -> Callable[[], Known]:
    """Problem (2) with clients of different sizes, who count alike or by size."""

    def known() -> Known:
        draw = np.random.default_rng(3)
        clients = [(x := draw.normal(size=(n, 4)), x @ draw.normal(size=4)) for n in (10, 30, 17)]
        federation = ft.Federation.from_arrays(clients, clients)
        p = federation.train.sizes / federation.train.sizes.sum() if weights == "size" else np.full(3, 1 / 3)
        return Known(federation, *problem_2(clients, 0.5, p))

    known.__name__ = "three sizes"
    return known


def own_minimisers() -> Known:
    return Known(least_squares(), None, [np.linalg.lstsq(x, y)[0] for x, y in clients_of(least_squares())])


def pooled_and_pulled() -> Known:
    """The minimiser of the mean risk, and every client's of its own risk + lam/2 |v - pooled|^2, with lam = 0.5."""
    clients = clients_of(least_squares())
    hessians = [x.T @ x / len(y) for x, y in clients]
    rights = [x.T @ y / len(y) for x, y in clients]
    pooled = np.linalg.solve(sum(hessians), sum(rights))
    own = [np.linalg.solve(h + 0.5 * np.eye(5), b + 0.5 * pooled) for h, b in zip(hessians, rights, strict=True)]
    return Known(least_squares(), pooled, own)


def drifting() -> Known:
    """Clients whose Hessians and minimisers differ, so that local steps drift: the minimiser of the mean risk."""
    draw = np.random.default_rng(2)
    clients = []
    for _ in range(6):
        x = draw.normal(size=(20, 3)) * draw.uniform(0.5, 2.0, 3)
        clients.append((x, x @ (3 * draw.normal(size=3))))
    pooled = np.linalg.solve(sum(x.T @ x for x, _ in clients), sum(x.T @ y for x, y in clients))
    return Known(ft.Federation.from_arrays(clients, clients), pooled, None)


def mild() -> Known:
    """Problem (2) with lam = 0.5 on four clients, Hessians with eigenvalues from 1 to 2."""
    federation = ft.Federation.load("clup-regression", clients=4, d=3, rows=12, kappa=2.0, R=1.0)
    return Known(federation, None, problem_2(clients_of(federation), 0.5, np.full(4, 1 / 4))[1])


def ill_conditioned(spread: float = 1.0) -> Known:
    """Problem (2) with lam = 100; every client's Hessian is diag(1, .., 1000), their own minimisers are ``spread`` apart.

    With one common Hessian H: w_i = (H + lam)^-1 (H m_i + lam g), m_i being the client's own minimiser and g their mean."""
    draw = np.random.default_rng(0)
    root, center = np.sqrt(np.logspace(0, 3, 6) * 6), draw.normal(size=6)
    own = [center + spread * draw.normal(size=6) for _ in range(5)]
    clients = [(np.diag(root), root * m) for m in own]
    h, lam = root**2 / 6, 100.0
    minimisers = [(h * m + lam * np.mean(own, 0)) / (h + lam) for m in own]
    return Known(ft.Federation.from_arrays(clients, clients), None, minimisers)


# -- who reaches what --------------------------------------------------------------------------------------------------
class Falling(Schedule):
    """4 / (t + 40): sums to infinity, its squares do not."""

    def at(self, round: int) -> float:
        return 4 / (round + 40)


def as_fedclup(lam: float) -> dict[str, Any]:
    """pFedMe with one step a round, which is FedCLUP's round with a step of (lam + 8)/(16 lam) on the server."""
    return {"lam": lam, "lr": (lam + 8) / (2 * lam * 8), "inner_lr": 1 / (lam + 8), "inner_steps": 40, "steps": 1}


TABLE = (
    *(
        FixedPoint(ft.FedCLUP(lam=lam, steps="theory"), "Problem (2)", pulled(lam), 80, {"engine": engine})
        for lam in PULLS
        for engine in ("loop", "vectorized")
    ),
    *(
        FixedPoint(ft.FedCLUP(lam=0.5, steps="theory"), "Problem (2)", weighed(weights), 80, {"weights": weights})
        for weights in ("uniform", "size")
    ),
    *(FixedPoint(ft.PFedMe(**as_fedclup(lam)), "Problem (2)", pulled(lam), 80) for lam in PULLS[1:]),
    FixedPoint(ft.FedProxPersonal(lam=0.5, lr=1 / 8.5, server_lr=1.0, steps=30), "Problem (2)", pulled(0.5), 75),
    FixedPoint(ft.Local(lr=0.1, steps=40), "the client's own minimiser", own_minimisers, 20),
    # one step a round makes FedAvg gradient descent on the pooled risk: no drift
    FixedPoint(
        ft.Ditto(lam=0.5, lr=0.1, steps=1, personal_steps=10), "the pooled minimiser and its prox", pooled_and_pulled, 150
    ),
    *(
        FixedPoint(method, "the pooled minimiser", drifting, rounds, {"cohort": cohort})
        for method, rounds in ((ft.Scaffold(lr=0.05, steps=6), 200), (ft.FedDyn(lr=0.05, steps=6, alpha=0.5), 600))
        for cohort in (1.0, 0.5)
    ),
    FixedPoint(ft.L2GD(lam=0.5, lr=Falling(), p=0.3), "Problem (2)", mild, 1500, tolerance=0.03, slow=True),
    FixedPoint(ft.AL2SGD(lam=100.0, mu=1.0, smoothness=1000.0), "Problem (2)", ill_conditioned, 6000, tolerance=1e-5, slow=True),
)
