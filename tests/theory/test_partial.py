"""PARTIAL's step sizes and bounds: values by hand, scalings, refusals, and runs that keep what the theorems promise."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.engine.rounds import play
from fedtailor.engine.setup import build_task, make_plan
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import InvalidArgument
from fedtailor.runs.store import Store
from fedtailor.theory.partial import (
    PartialSteps,
    dissimilarity,
    fedavgp_full,
    fedavgp_full_bound,
    fedavgp_full_rate,
    fedavgp_partial,
    fedavgp_partial_bound,
    fedavgp_partial_rate,
    scaffoldp_partial,
    scaffoldp_partial_bound,
    scaffoldp_partial_rate,
)

AVG = {"sigma_u2": 3.0, "sigma_v2": 2.0, "b2": 5.0}
SCAFFOLD = {"sigma_u2": 3.0, "sigma_v2": 2.0}
QUIET = {"sigma_u2": 0.0, "sigma_v2": 0.0}


# -- values by hand ---------------------------------------------------------------------------------------------------------
def test_largest_steps_by_hand():
    steps = fedavgp_partial(2.0, 5, m=4, n=16)
    assert steps == pytest.approx((1 / 640, 1 / 640, 2, 2, 1 / 320))
    assert scaffoldp_partial(2.0, 5, m=4, n=64) == pytest.approx((1 / 5760, 1 / 11520, 2, 4, 1 / 2880))  # 4/64^(2/3) = 1/4
    assert scaffoldp_partial(2.0, 5, m=16, n=64).gamma == pytest.approx(
        1 / 720
    )  # m = n^(2/3): from here on no price for sampling
    assert scaffoldp_partial(2.0, 5, m=64, n=64).gamma == pytest.approx(1 / 720)
    full = fedavgp_full(2.0, 5, n=9, T=7, gap=3.0, start2=1.0)
    assert full == pytest.approx((1 / 5880, 1 / 840, 7, 1, 1 / 840))
    assert fedavgp_full(2.0, 5, n=9, T=2, gap=3.0, start2=1.0).server_lr == 3  # sqrt(n)
    assert fedavgp_full(2.0, 5, n=9, T=6, gap=0.5, start2=24.0).server_lr == 12  # sqrt(24 * 6/(2 * 0.5))
    assert steps.options == {
        name: getattr(steps, name) for name in ("lr", "personal_lr", "server_lr", "personal_server_lr")
    }  # what the methods take


def test_tuned_steps_by_hand():
    # A = 4 * 2 * 1 * 5/(2 * 4) + 3/2 + 2 * 2/4 = 7.5; 3 L K T A/F_0 = 3 * 10 * 7.5/2.25 = 100
    steps = fedavgp_partial(1.0, 1, 2, 4, T=10, gap=2.25, **AVG)
    assert steps.gamma == pytest.approx(1 / 42)
    assert steps.server_lr == pytest.approx(math.sqrt(5 * 10 / 2.25))  # above sqrt(2)
    assert steps.personal_server_lr == pytest.approx(math.sqrt(2))
    assert fedavgp_partial(1.0, 1, 2, 4, T=10, gap=100.0, **AVG).server_lr == pytest.approx(math.sqrt(2))
    # sigma_u^2/n + sigma_v^2 = 2.75; 11 * 10 * 2.75/2.5 = 121
    assert fedavgp_full(1.0, 1, 4, 10, 2.5, 1.0, **SCAFFOLD).gamma == pytest.approx(1 / 95)
    # n^(2/3)/m = 4/2; sigma_u^2/m + m sigma_v^2/n = 2; 37 * 10 * 2/7.4 = 100
    assert scaffoldp_partial(1.0, 1, 2, 8, T=10, gap=7.4, **SCAFFOLD).gamma == pytest.approx(1 / 154)


def test_bounds_by_hand():
    steps = PartialSteps(1 / 128, 1 / 128, 2.0, 2.0, 1 / 64)
    assert fedavgp_partial_bound(steps, 1.0, 2, 2, 4, 8, 3.0, **AVG) == pytest.approx(
        4 * 3 / (8 * 2 / 64) + 12 * 12.5 / 64 + 128 * 2 * 5 / 64**2 / 4  # A = 10 + 1.5 + 1
    )
    assert fedavgp_partial_rate(1.0, 2, 2, 4, 75, 1.0, **AVG) == pytest.approx(8 * 0.5 + 129 / 75)
    full = PartialSteps(1 / 1000, 1 / 100, 10.0, 1.0, 1 / 100)
    assert fedavgp_full_bound(full, 1.0, 1, 4, 10, 3.0, 1.0, **SCAFFOLD) == pytest.approx(120 + 44 * 2.75 / 100 + 0.3)
    assert fedavgp_full_rate(1.0, 1, 4, 11, 4.0, **SCAFFOLD) == pytest.approx(8 * math.sqrt(11) + 337 * 4 / 11)
    small = PartialSteps(1 / 400, 1 / 400, 2.0, 2.0, 1 / 200)
    assert scaffoldp_partial_bound(small, 1.0, 1, 2, 8, 10, 3.0, **SCAFFOLD) == pytest.approx(240 + 148 * 2 / 200)
    assert scaffoldp_partial_rate(1.0, 1, 2, 8, 74, 1.0, **SCAFFOLD) == pytest.approx(8 + 288 * 2 / 74)


# -- what follows from the formulas -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [fedavgp_partial, scaffoldp_partial])
def test_the_step_falls_as_one_over_LK_and_the_outer_steps_with_the_turnout(steps):
    base = steps(1.0, 1, 3, 12)
    for L, K in ((2.0, 1), (1.0, 7), (0.5, 3)):
        sizes = steps(L, K, 3, 12)
        assert sizes.gamma * L * K == pytest.approx(base.gamma)
        assert (sizes.server_lr, sizes.personal_server_lr) == (base.server_lr, base.personal_server_lr)
    for m in range(1, 13):
        sizes = steps(1.0, 4, m, 12)
        assert sizes.server_lr == pytest.approx(math.sqrt(m))
        assert sizes.personal_server_lr == pytest.approx(math.sqrt(12 / m))
        assert sizes.lr * sizes.server_lr == pytest.approx(sizes.gamma)
        assert sizes.personal_lr * sizes.personal_server_lr == pytest.approx(sizes.gamma)


@pytest.mark.parametrize(("steps", "noise"), [(fedavgp_partial, AVG), (scaffoldp_partial, SCAFFOLD)])
def test_the_tuned_step_is_the_largest_without_noise_and_falls_with_noise_and_rounds(steps, noise):
    largest = steps(2.0, 4, 3, 9)
    assert steps(2.0, 4, 3, 9, T=50, gap=1.0, **dict.fromkeys(noise, 0.0)) == pytest.approx(largest)
    tuned = steps(2.0, 4, 3, 9, T=50, gap=1.0, **noise)
    assert tuned.gamma < largest.gamma
    assert steps(2.0, 4, 3, 9, T=51, gap=1.0, **noise).gamma < tuned.gamma
    assert steps(2.0, 4, 3, 9, T=50, gap=1.1, **noise).gamma > tuned.gamma
    for name in noise:
        assert steps(2.0, 4, 3, 9, T=50, gap=1.0, **(noise | {name: noise[name] + 1})).gamma < tuned.gamma


def test_dissimilarity_costs_nothing_when_all_take_part():
    known = {"T": 40, "gap": 1.0, "sigma_u2": 1.0, "sigma_v2": 1.0}
    assert fedavgp_partial(1.0, 3, 5, 5, b2=9.0, **known).gamma == fedavgp_partial(1.0, 3, 5, 5, b2=0.0, **known).gamma
    assert fedavgp_partial_rate(1.0, 3, 5, 5, b2=9.0, **known) == fedavgp_partial_rate(1.0, 3, 5, 5, b2=0.0, **known)


def test_the_corollaries_follow_from_the_theorems_at_their_own_steps():
    """What the paper leaves to the reader: with the tuned steps the theorem's right-hand side is below the corollary's."""
    draw = np.random.default_rng(0)
    for _ in range(200):
        n = int(draw.integers(1, 40))
        m, K, T = int(draw.integers(1, n + 1)), int(draw.integers(1, 20)), int(draw.integers(1, 3000))
        L, gap, start2, *noise = 10 ** draw.uniform(-2, 2, 6)
        avg, scaffold = dict(zip(AVG, noise, strict=True)), dict(zip(SCAFFOLD, noise, strict=False))
        shape = (L, K, m, n, T, gap)
        assert fedavgp_partial_bound(fedavgp_partial(*shape, **avg), *shape, **avg) <= fedavgp_partial_rate(*shape, **avg)
        steps = scaffoldp_partial(*shape, **scaffold)
        bound, rate = scaffoldp_partial_bound(steps, *shape, **scaffold), scaffoldp_partial_rate(*shape, **scaffold)
        assert bound <= rate * (1 + 1e-12)
        steps = fedavgp_full(L, K, n, T, gap, start2, **scaffold)
        bound = fedavgp_full_bound(steps, L, K, n, T, gap, start2, **scaffold)
        assert bound <= fedavgp_full_rate(L, K, n, T, gap, **scaffold) * (1 + 1e-12)


def test_rates_fall_with_rounds_local_steps_and_clients():
    for T in (10, 100, 1000):
        known = {"T": T, "gap": 1.0, "sigma_u2": 1.0, "sigma_v2": 0.0}
        avg = partial(fedavgp_partial_rate, 1.0, b2=1.0, **known)
        scaffold = partial(scaffoldp_partial_rate, 1.0, **known)
        for rate in (avg, scaffold):
            assert rate(2, 3, 9) > rate(4, 3, 9)  # more local steps
            assert rate(2, 3, 9) > rate(2, 6, 9)  # more clients per round
            assert rate(2, 3, 9) > rate(2, 3, 9, T=2 * T)
    noisy = {"T": 10**12, "gap": 1.0, "sigma_u2": 1.0, "sigma_v2": 0.0}
    assert scaffoldp_partial_rate(1.0, 8, 3, 9, **noisy) == pytest.approx(
        scaffoldp_partial_rate(1.0, 2, 3, 9, **noisy) / 2, rel=1e-4
    )
    floor = [fedavgp_partial_rate(1.0, K, 3, 9, T=10**12, gap=1.0, b2=1.0, **QUIET) for K in (2, 8)]
    assert floor[0] == pytest.approx(floor[1])  # b^2 enters as K b^2/K: long local work does not pay for it


# -- dissimilarity ----------------------------------------------------------------------------------------------------------
def test_dissimilarity_is_the_variance_over_clients():
    draw = np.random.default_rng(1)
    g = draw.normal(size=(7, 4))
    assert dissimilarity(np.tile(g[0], (5, 1))) == pytest.approx(0, abs=1e-30)
    assert dissimilarity(g) == pytest.approx((g**2).sum(1).mean() - (g.mean(0) ** 2).sum())
    assert dissimilarity(g) == pytest.approx(g.var(0).sum())
    assert dissimilarity(torch.from_numpy(g).requires_grad_()) == dissimilarity(g) == dissimilarity(g.tolist())
    assert dissimilarity(g + 1e6) == pytest.approx(dissimilarity(g), rel=1e-6)  # no cancellation
    assert dissimilarity([[1, 0], [-1, 0]]) == 1


# -- refusals ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda: fedavgp_partial(1.0, 2, 5, 4), "use m <= n"),
        (lambda: scaffoldp_partial(1.0, 2, 5, 4), "use m <= n"),
        (lambda: fedavgp_partial(1.0, 0, 2, 4), "K must be .* give the number of local steps"),
        (lambda: fedavgp_full(1.0, 0, 2, 4, 1.0, 1.0), "K must be .* give the number of local steps"),
        (lambda: scaffoldp_partial(1.0, 2.5, 2, 4), "K must be a whole number"),
        (lambda: fedavgp_partial(1.0, 2, 0, 4), "give the number of clients per round"),
        (lambda: fedavgp_partial(0.0, 2, 2, 4), "L must be greater than 0; give the smoothness"),
        (lambda: fedavgp_partial(math.nan, 2, 2, 4), "L must be a finite number"),
        (lambda: fedavgp_partial(1.0, 2, 2, 4, T=10), "give gap and sigma_u2 and sigma_v2 and b2 too"),
        (lambda: fedavgp_partial(1.0, 2, 2, 4, T=10, gap=1.0, **SCAFFOLD), "give b2 too"),
        (lambda: scaffoldp_partial(1.0, 2, 2, 4, sigma_u2=1.0), "or none of them"),
        (lambda: scaffoldp_partial(1.0, 2, 2, 4, T=10, gap=0.0, **SCAFFOLD), "gap must be greater than 0; give f at the start"),
        (lambda: scaffoldp_partial(1.0, 2, 2, 4, T=10, gap=1.0, sigma_u2=-1.0, sigma_v2=0.0), "sigma_u2 must be .* not negative"),
        (lambda: fedavgp_partial_rate(1.0, 2, 5, 4, 10, 1.0, **AVG), "use m <= n"),
        (lambda: dissimilarity([1.0, 2.0]), "one row per client"),
        (lambda: dissimilarity([[1.0], [2.0, 3.0]]), "one row per client"),
        (lambda: dissimilarity(np.zeros((0, 3))), "one row per client"),
        (lambda: dissimilarity([[math.inf, 0.0]]), "not finite"),
    ],
)
def test_refuses_with_a_fix(call, fix):
    with pytest.raises(InvalidArgument, match=fix):
        call()


def test_a_bound_refuses_steps_of_which_the_theorem_says_nothing():
    good = fedavgp_partial(1.0, 2, 2, 8)
    bound = partial(fedavgp_partial_bound, L=1.0, K=2, m=2, n=8, T=10, gap=1.0, **AVG)
    bound(good)
    with pytest.raises(InvalidArgument, match="use a smaller lr"):
        bound(PartialSteps(2 * good.lr, 2 * good.personal_lr, good.server_lr, good.personal_server_lr, 2 * good.gamma))
    with pytest.raises(InvalidArgument, match=r"3\.7 needs server_lr >= 1\.41"):
        bound(good._replace(server_lr=1.0, lr=good.gamma))  # FedSim's outer steps
    with pytest.raises(InvalidArgument, match="personal_server_lr >= 2"):
        bound(good._replace(personal_server_lr=1.0, personal_lr=good.gamma))
    with pytest.raises(InvalidArgument, match="set lr = gamma/server_lr"):
        bound(good._replace(lr=2 * good.lr))
    with pytest.raises(InvalidArgument, match=r"Theorem 4.5 needs 0 < gamma"):
        scaffoldp_partial_bound(good, 1.0, 2, 2, 8, 10, 1.0, **QUIET)  # 1/32 is above 1/72
    full = fedavgp_full(1.0, 2, 8, 9, 1.0, 1.0)
    with pytest.raises(InvalidArgument, match=r"Theorem 3.11 needs server_lr >= 10"):
        fedavgp_full_bound(full, 1.0, 2, 8, 10, 1.0, 1.0, **QUIET)


# -- runs -------------------------------------------------------------------------------------------------------------------
N, D, ROUNDS, LOCAL = 6, 2, 200, 3
L = 2.0  # h(z) = (sin z - y)^2/2 with |y| <= 1 has |h''| = |cos 2z + y sin z| <= 2, and (x, 1) is white


class Sine(torch.nn.Linear):
    """sin(w x + b): least squares on it is smooth, bounded below by 0 and not convex."""

    def forward(self, input):
        return torch.sin(super().forward(input))


def sine_gradient(model, batch):
    """Of the risk, for the clients of a round at once: weights [m, 1, D], rows [m, B, D]."""
    z = batch["x"] @ model["weight"].mT + model["bias"].unsqueeze(-2)
    slope = (torch.sin(z) - batch["y"].reshape(z.shape)) * torch.cos(z) / z.shape[-2]
    return {"weight": slope.mT @ batch["x"], "bias": slope.sum(-2)}


def clients():
    """Very different targets on inputs that are white: (1/12) sum (x, 1)(x, 1)' = 1 for every client."""
    draw = np.random.default_rng(3)
    out = []
    for _ in range(N):
        x = draw.normal(size=(12, D))
        x = np.linalg.qr(x - x.mean(0))[0] * math.sqrt(12)
        out.append((x, np.clip(np.sin(x @ draw.normal(size=D) + draw.normal()) + 0.1 * draw.normal(size=12), -1, 1)))
    return out


def gradients(data, u, v):
    z = [x @ u + v[i] for i, (x, _) in enumerate(data)]
    slope = [(np.sin(a) - y) * np.cos(a) for a, (_, y) in zip(z, data, strict=True)]
    return np.stack([x.T @ s / len(s) for s, (x, _) in zip(slope, data, strict=True)]), np.array([s.mean() for s in slope])


def measured(method, data, m, seed):
    """G_u + (m/n) G_v before each of the method's T rounds, and the largest b^2 met (a roll call is not a round)."""
    module = Sine(D, 1)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 0.3)
    federation = ft.Federation.from_arrays(data, data, task="regression").to(torch.float64)
    task = replace(build_task(module, federation, 0, torch.float64, bias=True), gradient=sine_gradient)
    engine = VectorizedEngine(make_plan(method, task, federation, None, seed, "uniform"))
    shared, server = method.init_server(task)
    store = Store(N)
    u, v, norms, b2 = np.full(D, 0.3), np.full(N, 0.3), [], 0.0
    for rnd, now in play(engine, shared, server, store, ROUNDS + method.roll_call, m):
        if not (method.roll_call and rnd.number == 0):
            by_u, by_v = gradients(data, u, v)
            norms.append((by_u.mean(0) ** 2).sum() + m / N * (by_v**2).mean())
            b2 = max(b2, dissimilarity(by_u))
        u = now[0]["model"]["weight"].numpy().ravel()
        met = np.flatnonzero(store.born)
        v[met] = store.get(met)["model"]["bias"].numpy().ravel()
    assert len(norms) == ROUNDS
    return np.array(norms), b2


def start(data):
    """f at the start (inf f >= 0) and the mean squared gradient in u there."""
    value = np.mean([((np.sin(x @ np.full(D, 0.3) + 0.3) - y) ** 2).mean() / 2 for x, y in data])
    return float(value), float((gradients(data, np.full(D, 0.3), np.full(N, 0.3))[0] ** 2).sum(1).mean())


def falls(norms):
    assert norms[-20:].mean() < 0.75 * norms[:20].mean()


@pytest.mark.parametrize("m", [2, 6])
def test_fedavgp_keeps_theorem_3_7(m):
    data = clients()
    gap, _ = start(data)
    steps = fedavgp_partial(L, LOCAL, m, N)
    norms, b2 = measured(ft.FedAvgP(steps=LOCAL, personal=["bias"], **steps.options), data, m, 0)
    assert norms.mean() <= fedavgp_partial_bound(steps, L, LOCAL, m, N, ROUNDS, gap, b2=b2, **QUIET)
    falls(norms)


def test_fedavgp_keeps_corollary_3_8():
    """Tuned for a b^2 that holds everywhere: |grad_u f_i|^2 <= mean h'^2 <= 4 on white inputs."""
    data = clients()
    gap, _ = start(data)
    known = {"b2": 4.0, **QUIET}
    steps = fedavgp_partial(L, LOCAL, 3, N, ROUNDS, gap, **known)
    norms, b2 = measured(ft.FedAvgP(steps=LOCAL, personal=["bias"], **steps.options), data, 3, 0)
    assert b2 <= 4
    assert norms.mean() <= fedavgp_partial_rate(L, LOCAL, 3, N, ROUNDS, gap, **known)
    assert norms[-20:].mean() < norms[:20].mean()  # such steps are short


def test_fedavgp_keeps_theorem_3_11():
    data = clients()
    gap, start2 = start(data)
    steps = fedavgp_full(L, LOCAL, N, ROUNDS, gap, start2, **QUIET)
    assert steps.server_lr == ROUNDS
    norms, _ = measured(ft.FedAvgP(steps=LOCAL, personal=["bias"], **steps.options), data, N, 0)
    assert norms.mean() <= fedavgp_full_rate(L, LOCAL, N, ROUNDS, gap, **QUIET)
    falls(norms)


@pytest.mark.parametrize("m", [2, 6])
def test_scaffoldp_keeps_corollary_4_6(m):
    data = clients()
    gap, _ = start(data)
    steps = scaffoldp_partial(L, LOCAL, m, N, ROUNDS, gap, **QUIET)
    norms, _ = measured(ft.ScaffoldP(steps=LOCAL, personal=["bias"], **steps.options), data, m, 0)
    assert norms.mean() <= scaffoldp_partial_rate(L, LOCAL, m, N, ROUNDS, gap, **QUIET)
    falls(norms)
