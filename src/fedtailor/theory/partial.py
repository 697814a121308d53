"""Step sizes and bounds that PARTIAL proves for FedAvg-P and Scaffold-P.

Letters as in the paper: n clients, m of them per round, K local steps, T rounds, L = max(L_u, L_v, L_uv, L_vu) of Assumption 2.1
(the smoothness of f_i in (u, v) together is never less, so it may stand for L), ``sigma_u2`` and ``sigma_v2`` the variances of
the stochastic gradients (2.2; zero with full batches), ``b2`` the gradient dissimilarity (2.3). All steps are tied by
gamma = lr * server_lr = personal_lr * personal_server_lr. Means over clients are plain.

``gap`` is F_0. Its definition (Table 1) is missing from the text; the proofs telescope f, so it is f(u^0, v^0) - inf f, and any
number above that serves as well. With a larger number the tuned gamma grows and the bound stays true.

What is bounded is the mean over rounds t < T of G_u + (m/n) G_v, taken at the *start* of each round, in expectation, with
G_u = |grad_u f|^2 and G_v = (1/n) sum |grad_v f_i|^2 (also Table 1; read off Lemma 3.2).
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from fedtailor.errors import InvalidArgument

_SLACK = 1 + 1e-9  # steps that sit on their limit come back from a division


class PartialSteps(NamedTuple):
    lr: float
    personal_lr: float
    server_lr: float
    personal_server_lr: float
    gamma: float

    @property
    def options(self) -> dict[str, float]:
        """The steps as arguments: ``ft.FedAvgP(steps=K, personal=..., **steps.options)``."""
        return {name: value for name, value in self._asdict().items() if name != "gamma"}


# -- FedAvg-P, some clients per round -------------------------------------------------------------------------------------
def fedavgp_partial(
    L: float,
    K: int,
    m: int,
    n: int,
    T: int | None = None,
    gap: float | None = None,
    sigma_u2: float | None = None,
    sigma_v2: float | None = None,
    b2: float | None = None,
) -> PartialSteps:
    """Theorem 3.7: gamma = 1/(32 L K), eta_u = sqrt(m), eta_v = sqrt(n/m).

    With all of T, gap, sigma_u2, sigma_v2 and b2, Corollary 3.8: gamma = 1/(32 L K + sqrt(3 L K T A / F_0)) where
    A = 4 (n - m) K b^2/(m n) + sigma_u^2/m + m sigma_v^2/n, and eta_u = max(sqrt(m), sqrt(b^2 T/(L F_0))).

    The corollary's formula lacks a bracket in the text; that all of A stands under the root follows from the theorem. The bound
    on eta_u by b^2 is kept for K = 1, where the term it is for vanishes. b^2 must hold wherever the iterates go.
    """
    _check(L=L, K=K, m=m, n=n)
    eta_v = math.sqrt(n / m)
    known = _all_or_none(T=T, gap=gap, sigma_u2=sigma_u2, sigma_v2=sigma_v2, b2=b2)
    if known is None:
        return _steps(1 / (32 * L * K), math.sqrt(m), eta_v)
    noise = _noise(K, m, n, known["sigma_u2"], known["sigma_v2"], known["b2"])
    gamma = 1 / (32 * L * K + math.sqrt(3 * L * K * known["T"] * noise / known["gap"]))
    return _steps(gamma, max(math.sqrt(m), math.sqrt(known["b2"] * known["T"] / (L * known["gap"]))), eta_v)


def fedavgp_partial_bound(
    steps: PartialSteps,
    L: float,
    K: int,
    m: int,
    n: int,
    T: int,
    gap: float,
    *,
    sigma_u2: float,
    sigma_v2: float,
    b2: float,
) -> float:
    """Theorem 3.7: 4 F_0/(T K gamma) + 12 L A gamma + 128 L^2 K (K - 1) b^2 gamma^2/eta_u^2, A as in ``fedavgp_partial``."""
    _check(L=L, K=K, m=m, n=n, T=T, gap=gap, sigma_u2=sigma_u2, sigma_v2=sigma_v2, b2=b2)
    _within(steps, 1 / (32 * L * K), math.sqrt(m), math.sqrt(n / m), "3.7")
    noise = _noise(K, m, n, sigma_u2, sigma_v2, b2)
    drift = 128 * L**2 * K * (K - 1) * b2 * steps.gamma**2 / steps.server_lr**2
    return 4 * gap / (T * K * steps.gamma) + 12 * L * noise * steps.gamma + drift


def fedavgp_partial_rate(
    L: float, K: int, m: int, n: int, T: int, gap: float, *, sigma_u2: float, sigma_v2: float, b2: float
) -> float:
    """Corollary 3.8: 8 sqrt(3 A L F_0/(K T)) + 129 L F_0/T, with its tuned steps; A as in ``fedavgp_partial``."""
    _check(L=L, K=K, m=m, n=n, T=T, gap=gap, sigma_u2=sigma_u2, sigma_v2=sigma_v2, b2=b2)
    noise = _noise(K, m, n, sigma_u2, sigma_v2, b2)
    return 8 * math.sqrt(3 * noise * L * gap / (K * T)) + 129 * L * gap / T


# -- FedAvg-P, all clients in every round ---------------------------------------------------------------------------------
def fedavgp_full(
    L: float,
    K: int,
    n: int,
    T: int,
    gap: float,
    start2: float,
    sigma_u2: float | None = None,
    sigma_v2: float | None = None,
) -> PartialSteps:
    """Theorem 3.11 (m = n): gamma = 1/(84 L K), eta_u = max(T, sqrt(B_0 T/(n L F_0)), sqrt(n)), eta_v = 1; no b^2 needed.

    With both variances the tuned gamma = 1/(84 L K + sqrt(11 L K T (sigma_u^2/n + sigma_v^2)/F_0)).

    ``start2`` is B_0/n, the mean over clients of |grad_u f_i(u^0, v_i^0)|^2. The theorem's last line has f in place of f_i, the
    definition before Lemma 3.5 and the proof have f_i; f_i is taken, the safer (grad_u f is the mean of the grad_u f_i, so its
    square is never larger). Lemma 3.6 asks for max(T, sqrt(n)) only; the theorem needs all three. With eta_u >= T the local
    steps are tiny: use float64.
    """
    _check(L=L, K=K, n=n, T=T, gap=gap, start2=start2)
    known = _all_or_none(sigma_u2=sigma_u2, sigma_v2=sigma_v2)
    noise = 0.0 if known is None else known["sigma_u2"] / n + known["sigma_v2"]
    gamma = 1 / (84 * L * K + math.sqrt(11 * L * K * T * noise / gap))
    return _steps(gamma, _full_outer(L, n, T, gap, start2), 1.0)


def fedavgp_full_bound(
    steps: PartialSteps,
    L: float,
    K: int,
    n: int,
    T: int,
    gap: float,
    start2: float,
    *,
    sigma_u2: float,
    sigma_v2: float,
) -> float:
    """Theorem 3.11: 4 F_0/(T K gamma) + 44 L (sigma_u^2/n + sigma_v^2) gamma + L F_0/T."""
    _check(L=L, K=K, n=n, T=T, gap=gap, start2=start2, sigma_u2=sigma_u2, sigma_v2=sigma_v2)
    _within(steps, 1 / (84 * L * K), _full_outer(L, n, T, gap, start2), 1.0, "3.11")
    return 4 * gap / (T * K * steps.gamma) + 44 * L * (sigma_u2 / n + sigma_v2) * steps.gamma + L * gap / T


def fedavgp_full_rate(L: float, K: int, n: int, T: int, gap: float, *, sigma_u2: float, sigma_v2: float) -> float:
    """Theorem 3.11, second part: 8 sqrt(11 L F_0/(K T) (sigma_u^2/n + sigma_v^2)) + 337 L F_0/T, with its tuned steps."""
    _check(L=L, K=K, n=n, T=T, gap=gap, sigma_u2=sigma_u2, sigma_v2=sigma_v2)
    return 8 * math.sqrt(11 * L * gap / (K * T) * (sigma_u2 / n + sigma_v2)) + 337 * L * gap / T


# -- Scaffold-P -----------------------------------------------------------------------------------------------------------
def scaffoldp_partial(
    L: float,
    K: int,
    m: int,
    n: int,
    T: int | None = None,
    gap: float | None = None,
    sigma_u2: float | None = None,
    sigma_v2: float | None = None,
) -> PartialSteps:
    """Theorem 4.5: gamma = min(m/n^(2/3), 1)/(72 L K), eta_u = sqrt(m), eta_v = sqrt(n/m); no b^2 needed.

    With all of T, gap, sigma_u2 and sigma_v2, Corollary 4.6: gamma = 1/(72 L K max(n^(2/3)/m, 1)
    + sqrt(37 L K T (sigma_u^2/m + m sigma_v^2/n)/F_0)).

    Holds for ``first="gradients"``, whose roll call is a round before the T of the theorem. (4.5) prints 2 for the 21 of the line
    above it; 37 = 21 + 16 needs the 21.
    """
    _check(L=L, K=K, m=m, n=n)
    known = _all_or_none(T=T, gap=gap, sigma_u2=sigma_u2, sigma_v2=sigma_v2)
    inverse = 72 * L * K * max(n ** (2 / 3) / m, 1)
    if known is not None:
        noise = _noise(K, m, n, known["sigma_u2"], known["sigma_v2"], 0.0)
        inverse += math.sqrt(37 * L * K * known["T"] * noise / known["gap"])
    return _steps(1 / inverse, math.sqrt(m), math.sqrt(n / m))


def scaffoldp_partial_bound(
    steps: PartialSteps, L: float, K: int, m: int, n: int, T: int, gap: float, *, sigma_u2: float, sigma_v2: float
) -> float:
    """Theorem 4.5: 4 F_0/(T K gamma) + 148 L (sigma_u^2/m + m sigma_v^2/n) gamma."""
    _check(L=L, K=K, m=m, n=n, T=T, gap=gap, sigma_u2=sigma_u2, sigma_v2=sigma_v2)
    _within(steps, min(m / n ** (2 / 3), 1) / (72 * L * K), math.sqrt(m), math.sqrt(n / m), "4.5")
    return 4 * gap / (T * K * steps.gamma) + 148 * L * _noise(K, m, n, sigma_u2, sigma_v2, 0.0) * steps.gamma


def scaffoldp_partial_rate(L: float, K: int, m: int, n: int, T: int, gap: float, *, sigma_u2: float, sigma_v2: float) -> float:
    """Corollary 4.6: 8 sqrt(37 L F_0/(K T) (sigma_u^2/m + m sigma_v^2/n)) + 288 L F_0/T max(1, n^(2/3)/m), tuned steps."""
    _check(L=L, K=K, m=m, n=n, T=T, gap=gap, sigma_u2=sigma_u2, sigma_v2=sigma_v2)
    noise = _noise(K, m, n, sigma_u2, sigma_v2, 0.0)
    return 8 * math.sqrt(37 * L * gap / (K * T) * noise) + 288 * L * gap / T * max(1, n ** (2 / 3) / m)


# -- Constants ------------------------------------------------------------------------------------------------------------
def dissimilarity(gradients: Any) -> float:
    """(2.3) with equality: b^2 = (1/n) sum |grad_u f_i|^2 - |grad_u f|^2 for an [n, d] array of the grad_u f_i at one point.

    Computed as the mean squared distance to the mean gradient, which is the same and never negative. Assumption 2.3 asks for
    the largest over all points.
    """
    try:
        rows = torch.as_tensor(gradients, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument("gradients must be an [n, d] array of numbers; stack one row per client") from error
    if rows.dim() != 2 or len(rows) == 0:
        raise InvalidArgument(f"gradients must be an [n, d] array, one row per client, not of shape {tuple(rows.shape)}")
    if not bool(torch.isfinite(rows).all()):
        raise InvalidArgument("gradients hold a number that is not finite; use a smaller step")
    return float(((rows - rows.mean(0)) ** 2).sum(1).mean())


def _noise(K: int, m: int, n: int, sigma_u2: float, sigma_v2: float, b2: float) -> float:
    return 4 * (n - m) * K * b2 / (m * n) + sigma_u2 / m + m * sigma_v2 / n


def _full_outer(L: float, n: int, T: int, gap: float, start2: float) -> float:
    return max(float(T), math.sqrt(start2 * T / (L * gap)), math.sqrt(n))


def _steps(gamma: float, eta_u: float, eta_v: float) -> PartialSteps:
    return PartialSteps(*map(float, (gamma / eta_u, gamma / eta_v, eta_u, eta_v, gamma)))


def _within(steps: PartialSteps, gamma: float, eta_u: float, eta_v: float, theorem: str) -> None:
    """Refuse steps that the theorem does not cover."""
    for product in (steps.lr * steps.server_lr, steps.personal_lr * steps.personal_server_lr):
        if not math.isclose(product, steps.gamma, rel_tol=1e-9):
            raise InvalidArgument(
                f"the theory needs gamma = lr * server_lr = personal_lr * personal_server_lr, not {steps.gamma:g} and "
                f"{product:g}; set lr = gamma/server_lr and personal_lr = gamma/personal_server_lr"
            )
    if not 0 < steps.gamma <= gamma * _SLACK:
        raise InvalidArgument(f"Theorem {theorem} needs 0 < gamma <= {gamma:g}, not {steps.gamma:g}; use a smaller lr")
    for name, least in (("server_lr", eta_u), ("personal_server_lr", eta_v)):
        if getattr(steps, name) * _SLACK < least:
            raise InvalidArgument(
                f"Theorem {theorem} needs {name} >= {least:g}, not {getattr(steps, name):g}; raise it and keep gamma"
            )


def _all_or_none(**terms: float | None) -> dict[str, Any] | None:
    """Check what the tuned gamma needs and return it; None if nothing of it was passed."""
    missing = [name for name, value in terms.items() if value is None]
    if len(missing) == len(terms):
        return None
    if missing:
        raise InvalidArgument(
            f"the tuned gamma needs {', '.join(terms)}; give {' and '.join(missing)} too (a variance is 0 with full batches), "
            "or none of them for the largest gamma"
        )
    _check(**terms)
    return terms


def _check(**terms: Any) -> None:
    for name, value in terms.items():
        if name in ("K", "m", "n", "T"):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise InvalidArgument(f"{name} must be a whole number of at least 1, not {value!r}; give {_WORDS[name]}")
        elif isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < 0:
            raise InvalidArgument(f"{name} must be a finite number and not negative, not {value!r}; give {_WORDS[name]}")
        elif value == 0 and name in ("L", "gap"):
            raise InvalidArgument(f"{name} must be greater than 0; give {_WORDS[name]}")
    if "m" in terms and terms["m"] > terms["n"]:
        raise InvalidArgument(f"m = {terms['m']} clients per round are more than the n = {terms['n']} there are; use m <= n")


_WORDS = {
    "K": "the number of local steps",
    "m": "the number of clients per round",
    "n": "the number of clients",
    "T": "the number of rounds",
    "L": "the smoothness of the risks (theory/constants.py finds it for linear models)",
    "gap": "f at the start minus a lower bound of f",
    "sigma_u2": "the variance of the stochastic gradient in u (0 with full batches)",
    "sigma_v2": "the variance of the stochastic gradient in v (0 with full batches)",
    "b2": "the gradient dissimilarity (see dissimilarity)",
    "start2": "the mean over clients of the squared gradient in u at the start",
}
