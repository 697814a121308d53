"""What MINIMAX proves: lower bounds, the rates of FedAvg and local training, their dichotomy, and FedProx in two stages.

Letters as in the paper: m clients with n_i rows and weights p_i, N rows in all; mu the strong convexity of the clients' empirical
risks, ``beta`` the smoothness of the loss on any record, ``loss`` a bound on the loss, ``sigma2`` the mean squared gradient of a
record at w*_i, ``R2`` the heterogeneity: sum p_i |w*_i - mean|^2 for average risks, the largest |w*_i - mean|^2 for single ones.
The minimum of each training problem is meant, not what a finite run reaches.

Most results hold up to an absolute constant that the paper does not give. It is the argument ``c`` here, with the value 1: such
numbers show how an error scales, they are no bounds. Where the paper gives the constant there is no ``c``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedtailor.errors import InvalidArgument

Array = NDArray[np.float64]


def average_excess_risk(individual: ArrayLike, weights: ArrayLike | None = None) -> float:
    """AER_p: the mean of the clients' IER_i (``metrics.truth.individual_excess_risk``), weighted by p_i (None: plain)."""
    risks = _vector("individual", individual)
    return float(risks @ _shares(weights, len(risks)))


# -- lower bounds (Theorem 8 and Corollary 9): p_i = n_i/N, sizes of the same order, logistic regression --------------------
def lower_average(d: int, m: int, N: int, R2: float, c: float = 1.0) -> float:
    """(14): no method has a mean squared error below c (d/(N/m) ^ R^2 + d/N) for all truths within R."""
    _check(d=d, m=m, N=N, R2=R2, c=c)
    return c * (min(d * m / N, R2) + d / N)


def lower_client(d: int, n: int, N: int, R2: float, c: float = 1.0) -> float:
    """(15): no method has, for a client of n rows, a squared error below c (d/n ^ R^2 + d/N) for all truths within R."""
    _check(d=d, n=n, N=N, R2=R2, c=c)
    return c * (min(d / n, R2) + d / N)


def lower_average_risk(mu: float, beta: float, m: int, N: int, R2: float, c: float = 1.0) -> float:
    """(16): the same for AER: c mu (beta/(N/m) ^ R^2 + beta/N)."""
    _check(mu=mu, beta=beta, m=m, N=N, R2=R2, c=c)
    return c * mu * (min(beta * m / N, R2) + beta / N)


def lower_client_risk(mu: float, beta: float, n: int, N: int, R2: float, c: float = 1.0) -> float:
    """(17): the same for IER_i: c mu (beta/n_i ^ R^2 + beta/N)."""
    _check(mu=mu, beta=beta, n=n, N=N, R2=R2, c=c)
    return c * mu * (min(beta / n, R2) + beta / N)


# -- upper bounds of the two baselines (Theorems 4 and 6) -------------------------------------------------------------------
def local_risk(mu: float, beta: float, loss: float, n: int, c: float = 1.0) -> float:
    """Theorem 4: IER_i of local training is at most c beta loss/(mu n_i), where n_i >= 4 beta/mu."""
    _check(mu=mu, beta=beta, loss=loss, n=n, c=c)
    _enough(n, 4 * beta / mu, "Theorem 4 needs n_i")
    return c * beta * loss / (mu * n)


def fedavg_average_risk(
    mu: float, beta: float, loss: float, sizes: ArrayLike, R2: float, weights: ArrayLike | None = None, c: float = 1.0
) -> float:
    """(9): AER_p of FedAvg is at most c (beta loss/mu sum p_i^2/n_i + beta R^2), where n_i >= 4 beta p_i/mu. ``weights``: None is
    n_i/N, which makes it smallest."""
    _check(mu=mu, beta=beta, loss=loss, R2=R2, c=c)
    n, p = _clients(sizes, weights)
    _enough(float((n / p).min()), 4 * beta / mu, "Theorem 6 needs n_i/p_i")
    return c * (beta * loss / mu * float((p**2 / n).sum()) + beta * R2)


def fedavg_client_risk(
    mu: float, beta: float, sigma2: float, sizes: ArrayLike, R2: float, weights: ArrayLike | None = None, c: float = 1.0
) -> float:
    """(10): IER_i of FedAvg is at most c (beta sigma^2/mu^2 sum p_i^2/n_i + beta^3 R^2/mu^2), for every client."""
    _check(mu=mu, beta=beta, sigma2=sigma2, R2=R2, c=c)
    n, p = _clients(sizes, weights)
    _enough(float((n / p).min()), 4 * beta / mu, "Theorem 6 needs n_i/p_i")
    return c * (beta * sigma2 / mu**2 * float((p**2 / n).sum()) + beta**3 / mu**2 * R2)


# -- the dichotomy (section 3.3) --------------------------------------------------------------------------------------------
def threshold(m: int, N: int, c: float = 1.0) -> float:
    """R^2 = c m/N: below, FedAvg is rate optimal, above, local training is. The paper's own switch has c = loss/mu."""
    _check(m=m, N=N, c=c)
    return c * m / N


def regime(R2: float, m: int, N: int, c: float = 1.0, width: float = 3.0) -> str:
    """ "shared" (FedAvg), "local", or "between" where R^2 is within a factor of ``width`` of ``threshold``.

    The theorem speaks of R^2 below or above m/N up to constants and leaves nothing between; ``c`` and ``width`` are the user's.
    Near the threshold both baselines have the optimal rate, and some sharing may be better than either by a constant.
    """
    _check(R2=R2)
    if not 1 <= width < math.inf:
        raise InvalidArgument(f"width must be at least 1 and finite, not {width!r}; with 1 nothing lies between")
    edge = threshold(m, N, c)
    return "shared" if edge >= R2 * width else "local" if edge * width <= R2 else "between"


def dichotomy_average_risk(
    mu: float, beta: float, loss: float, sizes: ArrayLike, R2: float, weights: ArrayLike | None = None, c: float = 1.0
) -> float:
    """(18): AER_p of the better of the two, switched at R^2 = loss/mu m/N: at most
    c (beta (loss m/(mu N) ^ R^2) + beta loss/mu sum p_i^2/n_i)."""
    _check(mu=mu, beta=beta, loss=loss, R2=R2, c=c)
    n, p = _clients(sizes, weights)
    pooled = beta * loss / mu * float((p**2 / n).sum())
    return c * (beta * min(loss * len(n) / (mu * float(n.sum())), R2) + pooled)


# -- FedProx in two stages (section 3.4) ------------------------------------------------------------------------------------
class ProxLam(NamedTuple):
    """``case`` as in the proof: "A" for large R, "B" and (Theorem 11 only) "C" for smaller ones."""

    lam: float
    case: str


def fedprox_lam(mu: float, R: float, sizes: ArrayLike, weights: ArrayLike | None = None) -> ProxLam:
    """Return the lam with which Theorem 11 (AER) is proved: with S = sum p_i/n_i, S_2 = sum p_i^2/n_i and C_p = p_max S/S_2,

    A: R >= sqrt(S): mu S/(16 R^2) · B: mu sqrt(S)/(16 C_p R) · C: R <= S_2/sqrt(S): mu S/(16 C_p S_2).
    """
    _check(mu=mu, R=R)
    n, p = _clients(sizes, weights)
    S, S2 = float((p / n).sum()), float((p**2 / n).sum())
    ratio = float(p.max()) * S / S2
    if math.sqrt(S) <= R:
        return ProxLam(mu * S / (16 * R**2), "A")
    if S2 / math.sqrt(S) <= R:
        return ProxLam(mu * math.sqrt(S) / (16 * ratio * R), "B")
    return ProxLam(mu * S / (16 * ratio * S2), "C")


def fedprox_client_lam(mu: float, R: float, m: int, N: int, c: float = 1 / 16) -> ProxLam:
    """Return the lam of Theorem 12 (IER, p_i = 1/m): c mu m/N where R^2 >= m/N ("A"), else c mu sqrt(m/(R^2 N + 1)) ("B").

    The paper asks for constants of the order of mu; 1/16 keeps its condition p_i lam <= mu/16 (48).
    """
    _check(mu=mu, R=R, m=m, N=N, c=c)
    return ProxLam(c * mu * m / N, "A") if m <= N * R**2 else ProxLam(c * mu * math.sqrt(m / (N * R**2 + 1)), "B")


def fedprox_average_risk(
    mu: float, beta: float, loss: float, lam: float, sizes: ArrayLike, R2: float, weights: ArrayLike | None = None, c: float = 1.0
) -> float:
    """Proposition 23: AER_p of FedProx at ``lam`` is at most c beta loss/(mu + lam) sum p_i/n_i + lam R^2/2 (c on the first term
    only), where n_i >= 4 beta/mu and p_i lam <= mu/16."""
    _check(mu=mu, beta=beta, loss=loss, lam=lam, R2=R2, c=c)
    n, p = _clients(sizes, weights)
    check_tie(mu, beta, lam, float(n.min()), float(p.max()))
    return c * beta * loss / (mu + lam) * float((p / n).sum()) + lam / 2 * R2


def fedprox_best_average_risk(
    mu: float, beta: float, loss: float, sizes: ArrayLike, R: float, weights: ArrayLike | None = None, c: float = 1.0
) -> float:
    """(28): with ``fedprox_lam``, c (mu/(1 ^ C_p) + (1 v C_p) beta loss/mu) (R sqrt(S) ^ S + S_2), letters as there."""
    _check(mu=mu, beta=beta, loss=loss, R=R, c=c)
    n, p = _clients(sizes, weights)
    S, S2 = float((p / n).sum()), float((p**2 / n).sum())
    ratio = float(p.max()) * S / S2
    return c * (mu / min(1, ratio) + max(1, ratio) * beta * loss / mu) * (min(R * math.sqrt(S), S) + S2)


def fedprox_best_client_risk(
    mu: float, beta: float, loss: float, sigma2: float, diameter: float, n: int, m: int, N: int, R: float, c: float = 1.0
) -> float:
    """(29): with ``fedprox_client_lam``, c ((mu + 1/mu)(beta loss + (sigma^2 beta^2 + beta^2 + sigma^2)/mu^2) + mu D^2)
    (R/sqrt(n_i) ^ 1/n_i + sqrt(m)/N)."""
    _check(mu=mu, beta=beta, loss=loss, sigma2=sigma2, diameter=diameter, n=n, m=m, N=N, R=R, c=c)
    inside = beta * loss + (sigma2 * beta**2 + beta**2 + sigma2) / mu**2
    return c * ((mu + 1 / mu) * inside + mu * diameter**2) * (min(R / math.sqrt(n), 1 / n) + math.sqrt(m) / N)


def fedprox_local_lr(mu: float, lam: float, step: int) -> float:
    """(26): 1/((mu + lam)(k + 1)), k counted from 0 in every round."""
    _check(mu=mu, lam=lam)
    return 1 / ((mu + lam) * (step + 1))


def fedprox_server_lr(mu: float, lam: float, number: int) -> float:
    """(26): 2 (mu + lam)/(lam mu (t + 1)), t counted from 0."""
    _check(mu=mu, lam=lam)
    if lam == 0:
        raise InvalidArgument("the server's step needs lam > 0 (with lam = 0 nothing is shared; use Local)")
    return 2 * (mu + lam) / (lam * mu * (number + 1))


def fedprox_local_steps(mu: float, beta: float, loss: float, diameter: float, lam: float, number: int) -> int:
    """(38): K_t + 1 >= (4 t + 20) lam^2 beta^2 D^2/(mu^2 (beta^2 D^2 ^ 2 lam loss ^ lam^2 D^2)), as in Lemma 15, for round t."""
    _check(mu=mu, beta=beta, loss=loss, diameter=diameter, lam=lam)
    least = _least(beta, loss, diameter, lam)
    return max(1, math.ceil((4 * number + 20) * lam**2 * beta**2 * diameter**2 / (mu**2 * least)) - 1) if least else 1


def fedprox_distance(
    mu: float, beta: float, loss: float, diameter: float, lam: float, rounds: int, weights: Sequence[float]
) -> float:
    """(39), with (26) and (38): E |g_T - g|^2 is at most
    12 (lam + mu)^2 m |p|^2 (beta^2 D^2 ^ 2 lam loss ^ lam^2 D^2)/(lam^2 mu^2 (T + 1))."""
    _check(mu=mu, beta=beta, loss=loss, diameter=diameter, lam=lam)
    if lam == 0:
        raise InvalidArgument("the global model needs lam > 0 (with lam = 0 nothing is shared; use Local)")
    p = _shares(weights, len(weights))
    spread = len(p) * float((p**2).sum())
    return 12 * (lam + mu) ** 2 * spread * _least(beta, loss, diameter, lam) / (lam**2 * mu**2 * (rounds + 1))


def _least(beta: float, loss: float, diameter: float, lam: float) -> float:
    return min(beta**2 * diameter**2, 2 * lam * loss, lam**2 * diameter**2)


# -- checks -----------------------------------------------------------------------------------------------------------------
def _clients(sizes: ArrayLike, weights: ArrayLike | None) -> tuple[Array, Array]:
    n = _vector("sizes", sizes)
    if not (n >= 1).all():
        raise InvalidArgument("sizes must be at least 1; give the number of rows of every client")
    return n, _shares(n if weights is None else weights, len(n))


def _shares(weights: ArrayLike | None, count: int) -> Array:
    p = np.ones(count) if weights is None else _vector("weights", weights)
    if len(p) != count or not (p > 0).all():
        raise InvalidArgument(f"weights must be {count} numbers greater than 0; give one per client")
    return p / p.sum()


def _vector(name: str, argument: Any) -> Array:
    try:
        values = np.asarray(argument, float)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} must be numbers, one per client, not {argument!r}") from error
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise InvalidArgument(f"{name} must be finite numbers, one per client; give a list of them")
    return values


def _check(**terms: Any) -> None:
    for name, value in terms.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value) or value < 0:
            raise InvalidArgument(f"{name} must be a finite number and not negative, not {value!r}")
        if value == 0 and name not in ("R2", "R", "lam", "sigma2"):
            raise InvalidArgument(f"{name} must be greater than 0; give a larger one")
    if terms.get("mu", 0) > terms.get("beta", math.inf):
        raise InvalidArgument(f"beta = {terms['beta']:g} is smaller than mu = {terms['mu']:g}; smoothness is never less than mu")


def check_tie(mu: float, beta: float, lam: float, n: float, share: float) -> None:
    """Refuse unless (48) holds: n_i >= 4 beta/mu and p_i lam <= mu/16."""
    _enough(n, 4 * beta / mu, "Proposition 21 needs n_i")
    if share * lam > mu / 16 * (1 + 1e-9):
        raise InvalidArgument(f"Proposition 21 needs p_i lam <= mu/16 = {mu / 16:g}, not {share * lam:g}; use a smaller lam")


def _enough(rows: float, least: float, claim: str) -> None:
    if rows < least:
        raise InvalidArgument(f"{claim} of at least {least:g}, not {rows:g}; use more rows, or weight decay for a larger mu")
