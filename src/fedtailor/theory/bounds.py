"""What CLUP proves about the error of Problem (2)'s solution and of FedCLUP, as functions of lam and of the rounds.

Letters as in the paper: m clients of n rows each, N = m n, equal weights; mu and L of the clients' empirical risks, ``rho2`` the
mean squared gradient of a record at w*_i (Assumption 3), ``R2`` the largest squared distance of a w*_i from their mean (5).
Errors are E |w_i - w*_i|^2, for every client. With clients of different sizes the smallest serves as n.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument
from fedtailor.task import Task
from fedtailor.theory.constants import constants, noise
from fedtailor.theory.rates import fedclup_rate, fedclup_steps


class Setting(NamedTuple):
    """The constants of Theorem 1."""

    mu: float
    L: float
    rho2: float
    R2: float
    n: int
    m: int

    @property
    def N(self) -> int:  # noqa: N802
        return self.n * self.m


def setting(mu: float, L: float, rho2: float, R2: float, n: int, m: int) -> Setting:
    """Check the constants and return them together."""
    for name, value in {"mu": mu, "L": L, "rho2": rho2, "R2": R2, "n": n, "m": m}.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise InvalidArgument(f"{name} must be a finite number and not negative, not {value!r}")
        if value == 0 and name not in ("rho2", "R2"):
            raise InvalidArgument(f"{name} must be greater than 0, not {value!r}")
    if mu > L:
        raise InvalidArgument(f"L = {L:g} is smaller than mu = {mu:g}; the smoothness is never less than the strong convexity")
    return Setting(float(mu), float(L), float(rho2), float(R2), n, m)


def setting_of(task: Task, federation: Federation) -> Setting:
    """Return the constants of a federation that knows its true parameters, for strongly convex linear models.

    rho2 is a mean over the training rows. A regularised risk has another minimum than the truth, so there is no weight decay.
    """
    curvature = constants(task, federation)
    rho2 = noise(task, federation).rho2
    assert federation.truth is not None
    truths = torch.stack([torch.cat([leaf.double().reshape(-1) for leaf in truth.values()]) for truth in federation.truth])
    R2 = float(((truths - truths.mean(0)) ** 2).sum(1).max())
    return setting(curvature.mu, curvature.smoothness, rho2, R2, int(federation.train.sizes.min()), len(federation))


# -- Theorem 1 -------------------------------------------------------------------------------------------------------------
class Statistical(NamedTuple):
    """Theorem 1: ``bound`` is the smaller of ``shared`` (first branch, falls with lam) and ``local`` (second, grows with it)."""

    bound: float
    shared: float
    local: float


def statistical(lam: float, setting: Setting) -> Statistical:
    """Theorem 1's bound on E |w_i - w*_i|^2 for the solution of Problem (2) at ``lam``.

    ``shared`` = 48 rho^2/(mu^2 N) + (48 L^2/mu^2 + 3) R^2 + 1/q_1, and ``local`` = 4 rho^2/(mu^2 n) + q_2.

    Two steps of the proof miss a factor: (50) squares a sum without the 2, and (66) has 4 rho^2 lam/(mu^3 n) where (35) put into
    (64) gives 16. The theorem as printed holds all the same: strong convexity at the minimum gives Lemmas 3 and 4 with half their
    right-hand sides and (35) with a quarter, which is more than what is missing.
    """
    shared = math.inf
    inverse = inverse_q1(lam, setting)
    if math.isfinite(inverse):
        mu2 = setting.mu**2
        shared = 48 * setting.rho2 / (mu2 * setting.N) + (48 * setting.L**2 / mu2 + 3) * setting.R2 + inverse
    local = 4 * setting.rho2 / (setting.mu**2 * setting.n) + q2(lam, setting)
    return Statistical(min(shared, local), shared, local)


def inverse_q1(lam: float, setting: Setting) -> float:
    """1/q_1(lam), equation (70), with rho^2/n where it prints rho^2/n^2: (52), from which it comes, has rho^2/n.

    Infinite unless 8 L^2 g(lam) <= 1, g(lam) = 4/mu (1/(mu + lam) + L/(mu + lam)^2): this is where (52) has its 16 from.
    """
    mu, L, rho2, R2, n, _ = setting
    _check_lam(lam)
    if math.isinf(lam):
        return 0.0
    g = 4 / mu * (1 / (mu + lam) + L / (mu + lam) ** 2)
    if 8 * L**2 * g > 1:
        return math.inf
    spread = 4 * L**2 * R2 + 2 * rho2 / n
    scatter = g / (1 - 4 * L**2 * g) * spread
    pooled = 16 * rho2 / (mu**2 * setting.N) + 16 * L**2 / mu**2 * R2
    return 12 / (mu + lam) ** 2 * spread + 48 * L**2 / (mu + lam) ** 2 * (scatter + pooled) + 3 * scatter


def q2(lam: float, setting: Setting) -> float:
    """Return the square bracket of (8): (4 rho^2/(mu^3 n) + 4 R^2/mu) lam + 8 R^2 lam^2/mu^2. (67) leaves out its first term."""
    mu, _, rho2, R2, n, _ = setting
    _check_lam(lam)
    if math.isinf(lam):
        return math.inf if rho2 or R2 else 0.0
    return (4 * rho2 / (mu**3 * n) + 4 * R2 / mu) * lam + 8 * R2 * lam**2 / mu**2


# -- Corollary 1 -----------------------------------------------------------------------------------------------------------
class Degree(NamedTuple):
    """Corollary 1: any lam in [``least``, ``most``] is minimax optimal up to constants; ``regime`` is "shared" or "local"."""

    regime: str
    least: float
    most: float

    @property
    def lam(self) -> float:
        """The end of the range that is nearest to the other regime."""
        return self.least if self.regime == "shared" else self.most


def optimal_lam(setting: Setting) -> Degree:
    """Corollary 1. R <= 1/sqrt(n): lam >= max(64 kappa^2 L, (2 kappa v 5) mu (2 L^2 R^2 + rho^2/n)/(L^2 R^2 + rho^2/N)) - mu.
    R > 1/sqrt(n): lam <= rho^2/(n mu R^2).

    The threshold 1/sqrt(n) has the units of the parameters; it is the paper's, for constants of order one.
    """
    mu, L, rho2, R2, n, _ = setting
    if n * R2 > 1:
        return Degree("local", 0.0, rho2 / (n * mu * R2))
    kappa, pooled = L / mu, L**2 * R2 + rho2 / setting.N
    ratio = (2 * L**2 * R2 + rho2 / n) / pooled if pooled else 0.0
    return Degree("shared", max(64 * kappa**2 * L, max(2 * kappa, 5) * mu * ratio) - mu, math.inf)


def optimal_bound(setting: Setting) -> float:
    """Corollary 1 at such a lam: C_3/N + C_4 (R^2 ^ 1/n), C_3 = 192 rho^2/mu^2,
    C_4 = (rho (1 + sqrt(4 C_2 + 5))/mu)^2 v 198 kappa^2, C_2 = ((1 + sqrt 3) rho/mu)^2 v 32 kappa^2 (80, 91)."""
    mu, L, rho2, R2, n, _ = setting
    kappa2 = (L / mu) ** 2
    c2 = max((1 + math.sqrt(3)) ** 2 * rho2 / mu**2, 32 * kappa2)
    c4 = max(rho2 * (1 + math.sqrt(4 * c2 + 5)) ** 2 / mu**2, 198 * kappa2)
    return 192 * rho2 / (mu**2 * setting.N) + c4 * min(R2, 1 / n)


# -- Corollaries 2 and 3 ---------------------------------------------------------------------------------------------------
class Plan(NamedTuple):
    """Corollary 2's steps, and what it takes to bring the squared error below a target."""

    lr: float
    server_lr: float
    steps: int
    rate: float
    rounds: int
    gradients: int  # per client


def fedclup_plan(lam: float, mu: float, L: float, epsilon: float, start: float = 1.0) -> Plan:
    """Corollary 2: eta, gamma and K, and the rounds T with rate^T ``start`` <= ``epsilon``; K T gradients per client.

    ``start`` is the squared error (with the inner problems' share, see ``optimization``) before the first round.
    """
    if not 0 < epsilon < math.inf or not 0 <= start < math.inf:
        raise InvalidArgument(f"epsilon must be greater than 0 and start at least 0, not {epsilon!r} and {start!r}")
    lr, server_lr, steps = fedclup_steps(lam, mu, L)
    rate = fedclup_rate(lam, mu, L)
    rounds = 0 if start <= epsilon else math.ceil(math.log(start / epsilon) / -math.log(rate))
    return Plan(lr, server_lr, steps, rate, rounds, rounds * steps)


def optimization(lam: float, mu: float, L: float, rounds: int, start_global: float, start_local: float) -> tuple[float, float]:
    """Theorem 2 with Corollary 2's steps: after ``rounds`` steps of the server, bounds on |g_T - g|^2 and, once the clients have
    answered g_T, on the mean over clients of |w_i - w~_i|^2.

    ``start_global`` is |g_0 - g|^2, ``start_local`` the mean of |w_i,0 - prox_i(g_0)|^2. The proof shows that
    |g_t - g|^2 + c_1 e_t falls by the rate in every round (114), e_t being the mean squared error of the inner problems after K
    steps. With (118) for the denominator c_1 = 2 lam^2/eps (1/eps + 4 gamma), eps = mu_g (1 - gamma mu_g)/2; and by (130) the
    clients' error is at most 2 e_t + 2 L_w^2 |g_t - g|^2. The paper's O hides these constants.
    """
    lr, gamma, steps = fedclup_steps(lam, mu, L)
    mu_g = lam * mu / (lam + mu)
    eps = mu_g / 2 * (1 - gamma * mu_g)
    c1 = 2 * lam**2 / eps * (1 / eps + 4 * gamma)
    inner = (1 - lr * (mu + lam)) ** steps * start_local
    global_error = fedclup_rate(lam, mu, L) ** rounds * (start_global + c1 * inner)
    return global_error, max(2 / c1, 2 * (lam / (lam + mu)) ** 2) * global_error


def total(lam: float, setting: Setting, rounds: int, start: float) -> float:
    """Corollary 3: 2 rate^T ``start`` + 2 (Theorem 1's bound), the squared error of FedCLUP's models after T rounds.

    ``start`` is E |w_i,0 - w~_i|^2. The paper writes the second part up to a constant; the 2 comes from splitting the square, as
    in its first part. The first part lets the local error fall by the rate from the start on, where the proof has a constant
    (see ``optimization``); ``start`` may carry it.
    """
    _check_lam(lam)
    if math.isinf(lam):
        raise InvalidArgument("FedCLUP needs a finite lam; for one model for all use statistical(inf, ...)")
    if lam == 0:
        return 2 * statistical(0.0, setting).bound  # nothing is shared, so there are no rounds to wait for
    return 2 * fedclup_rate(lam, setting.mu, setting.L) ** rounds * start + 2 * statistical(lam, setting).bound


def _check_lam(lam: Any) -> None:
    if isinstance(lam, bool) or not isinstance(lam, (int, float)) or not lam >= 0:
        raise InvalidArgument(f"lam must be a number of at least 0 (or inf), not {lam!r}")
