"""Generated federations with known truth: R is in the *data*, not only in the target.

In every generator client i's parameters are w_i = w_0 + (a deviation of size R), and labels or targets are drawn from the
model with those parameters.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument
from fedtailor.task.kinds import CLASSIFICATION, REGRESSION, kind_of

Array = NDArray[np.float64]


def clup_logistic(
    clients: int = 10, rows: int = 200, d: int = 10, R: float = 1.0, seed: int = 0, test_rows: int = 200, separate: bool = True
) -> Federation:
    """CLUP section 6: x ~ N(v_k, diag(j^-1.2)), v_k ~ N(0, I) (zero if not ``separate``); w_k = w_0 + R delta_k with
    delta_k ~ N(0, I/d), labels drawn from the sigmoid (the authors' code takes the sign, which makes R invisible)."""
    _positive(clients=clients, rows=rows, d=d, test_rows=test_rows)
    draw = rng.generator(seed, "clup-logistic")
    scale = np.arange(1, d + 1) ** -0.6
    center = draw.normal(size=d)
    truth = [center + R * draw.normal(size=d) / np.sqrt(d) for _ in range(clients)]
    means = [draw.normal(size=d) * separate for _ in range(clients)]

    def sample(i: int, n: int) -> tuple[Array, NDArray[np.int64]]:
        x = means[i] + draw.normal(size=(n, d)) * scale
        return x, _coin(draw, x @ truth[i])

    return _make("clup-logistic", sample, truth, clients, rows, test_rows)


def clup_regression(
    clients: int = 10,
    rows: int = 100,
    d: int = 10,
    kappa: float = 10.0,
    R: float = 1.0,
    noise: float = 0.1,
    seed: int = 0,
    test_rows: int = 100,
    aligned: bool = False,
) -> Federation:
    """CLUP Figures 7-8: least squares whose Hessians X'X/n have eigenvalues spaced evenly in log from 1 to ``kappa`` exactly,
    on every client (mu = 1, L = kappa), in directions of its own (``aligned``: the same for all, so that the mean has kappa too);
    w_k = w_0 + R delta_k, delta_k on the unit sphere."""
    _positive(clients=clients, d=d, test_rows=test_rows)
    if rows < d:
        raise InvalidArgument(f"clup-regression needs at least d = {d} rows per client, not {rows}")
    if kappa < 1:
        raise InvalidArgument(f"the condition number kappa must be at least 1, not {kappa}")
    draw = rng.generator(seed, "clup-regression")
    spectrum = np.logspace(0, np.log10(kappa), d) if d > 1 else np.ones(1)
    center = draw.normal(size=d)
    truth = [center + R * _unit(draw, d) for _ in range(clients)]
    turns = [np.linalg.qr(draw.normal(size=(d, d)))[0] for _ in range(clients)]
    turns = [turns[0]] * clients if aligned else turns

    def sample(i: int, n: int) -> tuple[Array, Array]:
        basis = np.linalg.qr(draw.normal(size=(n, d)))[0] if n >= d else draw.normal(size=(n, d)) / np.sqrt(n)
        x = np.sqrt(n) * basis * np.sqrt(spectrum) @ turns[i].T  # X'X/n = Q diag(spectrum) Q'
        return x, x @ truth[i] + noise * draw.normal(size=n)

    return _make("clup-regression", sample, truth, clients, rows, test_rows)


def minimax_logistic(
    clients: int = 5, rows: int = 100, d: int = 100, R: float = 1.0, seed: int = 0, test_rows: int = 100
) -> Federation:
    """MINIMAX Appendix D: w ~ N(0, I), w_i = w + R v_i with v_i a random unit vector negatively correlated with w;
    x ~ N(0, I), labels drawn from the sigmoid."""
    _positive(clients=clients, rows=rows, d=d, test_rows=test_rows)
    draw = rng.generator(seed, "minimax-logistic")
    center = draw.normal(size=d)
    directions = [_unit(draw, d) for _ in range(clients)]
    truth = [center + R * (-v if v @ center > 0 else v) for v in directions]

    def sample(i: int, n: int) -> tuple[Array, NDArray[np.int64]]:
        x = draw.normal(size=(n, d))
        return x, _coin(draw, x @ truth[i])

    return _make("minimax-logistic", sample, truth, clients, rows, test_rows)


def clusters(
    clients: int = 12,
    groups: int = 3,
    rows: int = 100,
    d: int = 10,
    R: float = 0.1,
    distance: float = 5.0,
    task: str = "regression",
    noise: float = 0.1,
    seed: int = 0,
    test_rows: int = 100,
) -> Federation:
    """Groups of clients far from each other: the groups' centers are all ``distance`` apart and average to zero, a client's
    parameters lie at distance R from its group's center, client i is in group i mod ``groups``; x ~ N(0, I), targets linear
    with noise, or with task='classification' labels drawn from the sigmoid."""
    _positive(clients=clients, groups=groups, rows=rows, d=d, test_rows=test_rows)
    if not groups <= min(clients, d):
        raise InvalidArgument(f"{groups} groups need at least as many clients and features, not {clients} and d = {d}")
    kind = kind_of(task)
    if kind not in (REGRESSION, CLASSIFICATION):
        raise InvalidArgument(f"clusters are for task={REGRESSION!r} or {CLASSIFICATION!r}, not {task!r}")
    draw = rng.generator(seed, "clusters")
    # orthonormal vectors are sqrt(2) apart, each from each
    corners = np.linalg.qr(draw.normal(size=(d, groups)))[0].T * distance / np.sqrt(2)
    centers = corners - corners.mean(0)
    truth = [centers[i % groups] + R * _unit(draw, d) for i in range(clients)]

    def sample(i: int, n: int) -> tuple[Array, NDArray[np.generic]]:
        x = draw.normal(size=(n, d))
        mean = x @ truth[i]
        return x, mean + noise * draw.normal(size=n) if kind.least_squares else _coin(draw, mean)

    fed = _make("clusters", sample, truth, clients, rows, test_rows)
    return replace(fed, notes=(f"Client i belongs to group i mod {groups}.",))


def instances(
    clients: int = 20,
    rows: int = 120,
    d: int = 10,
    share: float = 0.5,
    visible: float = 3.0,
    noise: float = 0.1,
    seed: int = 0,
    test_rows: int = 200,
    val_rows: int = 60,
) -> Federation:
    """Two kinds of rows in every client: a share ``share`` follows a law that is everybody's, the rest the client's own.

    y = [x.w > ``noise`` * N(0, 1)] with w of length one: w_0 for a common row, w_i for one of client i's own, all at random.
    x ~ N(0, I) plus ``visible``/2 along a direction for a common row, minus it for an own one; the direction is the same for all
    clients and no law looks along it. So the best guess of a row's kind from x has AUC Phi(visible / sqrt(2)): 0 hides it. The
    kinds are in ``train.kinds``, ``test.kinds``, ``val.kinds`` (1: common)."""
    _positive(clients=clients, rows=rows, test_rows=test_rows)
    if d < 2:
        raise InvalidArgument(f"instances need d of at least 2 (one direction shows the kind), not {d}")
    for name, value, most in (
        ("share", share, 1.0),
        ("visible", visible, np.inf),
        ("noise", noise, np.inf),
        ("val_rows", val_rows, np.inf),
    ):
        if not 0 <= value <= most:
            raise InvalidArgument(f"{name} must be at least 0{'' if most > 1 else ' and at most 1'}, not {value}")
    draw = rng.generator(seed, "instances")
    direction = _unit(draw, d)

    def law() -> Array:
        w = _unit(draw, d)
        w -= (w @ direction) * direction
        return w / np.linalg.norm(w)

    common, own = law(), [law() for _ in range(clients)]

    def sample(i: int, n: int) -> tuple[Array, NDArray[np.int64], NDArray[np.bool_]]:
        kind = draw.random(n) < share
        x = draw.normal(size=(n, d)) + visible * (kind - 0.5)[:, None] * direction
        score = np.where(kind, x @ common, x @ own[i])
        return x, (score > noise * draw.normal(size=n)).astype(np.int64), kind

    sizes = {"train": rows, "test": test_rows, "val": val_rows}
    samples = {part: [sample(i, n) for i in range(clients)] for part, n in sizes.items() if n}
    pairs = {part: [(x, y) for x, y, _ in triples] for part, triples in samples.items()}
    fed = Federation.from_arrays(pairs["train"], pairs["test"], pairs.get("val"), task=CLASSIFICATION, name="instances")
    kinds = {part: torch.from_numpy(np.concatenate([kind for *_, kind in triples])) for part, triples in samples.items()}
    return replace(fed, **{part: replace(getattr(fed, part), kinds=kinds[part]) for part in samples})


def _unit(draw: np.random.Generator, d: int) -> Array:
    v = draw.normal(size=d)
    return v / np.linalg.norm(v)


def _coin(draw: np.random.Generator, logits: Array) -> NDArray[np.int64]:
    return (draw.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(np.int64)


def _positive(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise InvalidArgument(f"{name} must be at least 1, not {value}")


def _make(name: str, sample: object, truth: list[Array], clients: int, rows: int, test_rows: int) -> Federation:
    assert callable(sample)
    train = [sample(i, rows) for i in range(clients)]
    test = [sample(i, test_rows) for i in range(clients)]
    return Federation.from_arrays(train, test, truth=truth, name=name)
