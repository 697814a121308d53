"""Epsilon against closed forms, numerical integrals, the literature's transcription and the library's own accountants."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy.special import gammaln, logsumexp
from scipy.stats import norm

import fedtailor as ft
from fedtailor.engine.private import spends
from fedtailor.engine.setup import build_task, cohort_of, make_plan, visits_of
from fedtailor.errors import InvalidArgument
from fedtailor.local import Private
from fedtailor.privacy import accountant as books
from fedtailor.privacy.accountant import Spend, delta_of, epsilon, epsilons, gathered, noise_for
from fedtailor.runs import folder
from tests.make import federation, the_round

TUTORIAL = Spend(256 / 60_000, 60 * 60_000 // 256)  # 60 epochs of MNIST in batches of 256


def gaussian_delta(eps: float, mu: float) -> float:
    """Balle and Wang 2018, Theorem 8: the delta of a Gaussian mechanism with sensitivity over noise mu."""
    return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu))


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (4.0, 9), (10.0, 100), (0.8, 3)])
def test_full_batches_are_a_gaussian_mechanism(noise: float, steps: int) -> None:
    found = epsilon([Spend(1.0, steps)], noise, 1e-5)
    mu = math.sqrt(steps) / noise
    assert gaussian_delta(found, mu) <= 1e-5
    assert gaussian_delta(found - 0.01, mu) > 1e-5


def sampled_delta(eps: float, q: float, mu: float) -> float:
    """The hockey-stick divergence of N(0, 1) and (1-q) N(0, 1) + q N(mu, 1), the larger of both directions, on a fine grid."""
    z = np.linspace(-40, 40, 800_001)
    p, mixed = norm.pdf(z), (1 - q) * norm.pdf(z) + q * norm.pdf(z, mu)
    step = z[1] - z[0]
    return max(float(np.maximum(a - math.exp(eps) * b, 0).sum() * step) for a, b in ((p, mixed), (mixed, p)))


@pytest.mark.parametrize(("q", "noise", "releases"), [(0.1, 1.0, 1), (0.3, 2.0, 4), (0.02, 0.7, 1), (0.5, 1.5, 2)])
def test_one_poisson_sample_is_the_integral(q: float, noise: float, releases: int) -> None:
    """Several releases of one sample: given the sample, one release with 1/sqrt of the noise."""
    found = epsilon([Spend(q, 1, releases)], noise, 1e-5)
    mu = math.sqrt(releases) / noise
    assert sampled_delta(found, q, mu) <= 1e-5 * 1.001
    assert sampled_delta(found - 0.01, q, mu) > 1e-5


def test_two_releases_of_a_sample_are_the_integral_in_the_plane() -> None:
    """N(0, I) against (1-q) N(0, I) + q N((mu, mu), I) in two dimensions, without the reduction to one."""
    q, noise = 0.2, 1.3
    found = epsilon([Spend(q, 1, 2)], noise, 1e-5)
    axis = np.linspace(-9, 10, 1901)
    one, other = norm.pdf(axis), norm.pdf(axis, 1 / noise)
    p = one[:, None] * one
    mixed = (1 - q) * p + q * other[:, None] * other
    cell = (axis[1] - axis[0]) ** 2

    def delta(eps: float) -> float:
        return max(float(np.maximum(a - math.exp(eps) * b, 0).sum() * cell) for a, b in ((p, mixed), (mixed, p)))

    assert delta(found) <= 1.01e-5
    assert delta(found - 0.02) > 1e-5


def by_the_book(q: float, noise: float, steps: int, delta: float) -> float:
    """Mironov, Talwar and Zhang 2019, section 3.3, for whole orders, and the plain conversion of Mironov 2017."""
    best = math.inf
    for alpha in range(2, 128):
        k = np.arange(alpha + 1)
        choose = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)
        terms = choose + k * math.log(q) + (alpha - k) * math.log1p(-q) + k * (k - 1) / (2 * noise**2)
        best = min(best, steps * float(logsumexp(terms)) / (alpha - 1) - math.log(delta) / (alpha - 1))
    return best


def test_the_tutorial_on_mnist() -> None:
    """Noise 1.1, 60 epochs, delta 1e-5: known for epsilon 3 by the first conversion; later ones are tighter, in this order."""
    published = by_the_book(TUTORIAL.q, 1.1, TUTORIAL.steps, 1e-5)
    assert 2.9 < published < 3.1
    assert 2.0 < epsilon([TUTORIAL], 1.1, 1e-5, "prv") < epsilon([TUTORIAL], 1.1, 1e-5, "rdp") < published


@pytest.mark.parametrize("spend", [TUTORIAL, Spend(0.05, 300), Spend(1.0, 20)], ids=["tutorial", "small", "full"])
def test_it_is_what_the_library_says_when_asked_directly(spend: Spend) -> None:
    event: Any = dp.GaussianDpEvent(1.1)
    event = dp.SelfComposedDpEvent(event if spend.q == 1 else dp.PoissonSampledDpEvent(spend.q, event), spend.steps)
    direct = pld.PLDAccountant().compose(event).get_epsilon(1e-5)
    assert direct - 1e-3 <= epsilon([spend], 1.1, 1e-5, "prv") <= direct + 0.02
    orders = [1 + x / 10 for x in range(1 if spend.q == 1 else 20, 100)] + list(range(12, 64))  # where its series converge
    renyi = rdp.RdpAccountant(orders).compose(event).get_epsilon(1e-5)
    assert epsilon([spend], 1.1, 1e-5, "rdp") == pytest.approx(renyi, rel=1e-2)


def test_composition() -> None:
    whole = epsilon([Spend(0.1, 60)], 1.2, 1e-5)
    assert epsilon([Spend(0.1, 20), Spend(0.1, 30), Spend(0.1, 10)], 1.2, 1e-5) == whole
    assert gathered([Spend(1.0, 3, 2), Spend(1.0, 4), Spend(0.2, 0), Spend(0.3, 5, 2)]) == (Spend(0.3, 5, 2), Spend(1.0, 1, 10))
    mixed = epsilon([Spend(0.1, 60), Spend(0.2, 10, 2), Spend(1.0, 1)], 1.2, 1e-5)
    assert whole < mixed < epsilon([Spend(0.2, 70, 2), Spend(1.0, 1)], 1.2, 1e-5)
    once, again = epsilon([Spend(0.1, 60, 2)], 1.2, 1e-5), epsilon([Spend(0.1, 120)], 1.2, 1e-5)
    assert whole < again < once  # to use a sample twice costs more than to draw twice
    assert epsilon([], 1.0, 1e-5) == 0
    assert epsilon([Spend(0.1, 5)], 0.0, 1e-5) == math.inf


def test_no_noise_worth_speaking_of_is_a_large_number_and_quick() -> None:
    assert books.LARGE < epsilon([Spend(0.5, 1000)], 0.02, 1e-5) < math.inf


def test_many_kinds_of_clients_are_rounded_up_a_little() -> None:
    rows = range(60, 60 + 2 * books.DISTINCT, 2)
    clients = [[Spend(16 / n, 3 * n, 1)] for n in rows]
    deltas = [1e-5] * len(clients)
    alone = epsilons(clients[::9], 2.0, deltas[::9])
    together = epsilons([*clients, [Spend(1.0, 4)]], 2.0, [*deltas, 1e-5])
    for exact, rounded in zip(alone, together[:-1][::9], strict=True):
        assert exact <= rounded <= 1.09 * exact
    assert together[-1] == epsilon([Spend(1.0, 4)], 2.0, 1e-5)  # q = 1 stays what it is


@pytest.mark.parametrize(("target", "how"), [(0.5, "prv"), (8.0, "prv"), (1.0, "rdp")])
def test_the_noise_for_a_target(target: float, how: str) -> None:
    clients = [[Spend(0.1, 50)], [Spend(0.05, 200)], [Spend(0.1, 20)]]
    deltas = [1e-5, 1e-5, 1e-6]
    noise = noise_for(target, clients, deltas, how)
    assert max(epsilons(clients, noise, deltas, how)) <= target
    assert max(epsilons(clients, noise * 0.99, deltas, how)) > target


def test_a_target_that_cannot_be_reached() -> None:
    with pytest.raises(InvalidArgument, match=r"^target_epsilon=1e-06 cannot be reached: [^\n]*$"):
        noise_for(1e-6, [[Spend(0.1, 50)]], [1e-5])


def test_delta_is_well_below_one_in_the_rows() -> None:
    assert delta_of(100) == 1e-5
    assert delta_of(1_000_000) == pytest.approx(1e-7)


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'fedtailor\[privacy\]'"):
        epsilon([Spend(0.123, 7)], 1.0, 1e-5)


# -- what a run spends ----------------------------------------------------------------------------------------------------
SIZES = [20, 40, 5]


def counted(method: ft.Algorithm, visits: list[int], batch_size: int | None = 8) -> list[tuple[Spend, ...]]:
    fed = federation(SIZES)
    task = build_task("mlp", fed, 0, fed.train.x.dtype, True)
    return [gathered(s) for s in spends(make_plan(method, task, fed, batch_size, 0, "uniform"), np.array(visits))]


OPT = Private(clip=1.0, noise=2.0, seed=1)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        # batches of 8 of 20 and 40 rows: 3 and 5 steps per epoch; 5 rows are one full batch
        (ft.FedAvg(epochs=2, opt=OPT), [[Spend(0.4, 24)], [Spend(0.2, 10)], [Spend(1.0, 1, 4)]]),
        (ft.Ditto(steps=3, opt=OPT), [[Spend(0.4, 12, 2)], [Spend(0.2, 3, 2)], [Spend(1.0, 1, 12)]]),
        (ft.Ditto(steps=3, personal_steps=2, opt=OPT), [[Spend(0.4, 20)], [Spend(0.2, 5)], [Spend(1.0, 1, 10)]]),
        (ft.FedAvgFT(steps=3, finetune_steps=7, opt=OPT), [[Spend(0.4, 19)], [Spend(0.2, 10)], [Spend(1.0, 1, 13)]]),
        (ft.PFedMe(steps=3, inner_steps=5, opt=OPT), [[Spend(0.4, 12, 5)], [Spend(0.2, 3, 5)], [Spend(1.0, 1, 30)]]),
        (ft.FedCLUP(steps=6, same_batch=True, opt=OPT), [[Spend(0.4, 4, 6)], [Spend(0.2, 1, 6)], [Spend(1.0, 1, 12)]]),
        (ft.FedAlt(steps=2, personal_epochs=1, opt=OPT), [[Spend(0.4, 20)], [Spend(0.2, 7)], [Spend(1.0, 1, 6)]]),
        (ft.PartialFed(steps=2, logit_steps=3, opt=OPT), [[Spend(0.4, 20)], [Spend(0.2, 5)], [Spend(1.0, 1, 10)]]),
        # shuffled: a row is in one batch of an epoch; 4 steps of 3 per epoch may use it twice
        (
            ft.FedAvg(steps=4, opt=Private(noise=2.0, seed=1, sampling="shuffle")),
            [[Spend(1.0, 1, 8)], [Spend(1.0, 1, 1)], [Spend(1.0, 1, 8)]],
        ),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, ft.Algorithm) else "",
)
def test_what_each_client_releases(method: ft.Algorithm, wanted: list[list[Spend]]) -> None:
    assert counted(method, [4, 1, 2]) == [tuple(w) for w in wanted]


def test_full_batches_release_every_step() -> None:
    assert counted(ft.FedAvg(steps=3, opt=OPT), [4, 1, 2], None) == [
        (Spend(1.0, 1, 12),),
        (Spend(1.0, 1, 3),),
        (Spend(1.0, 1, 6),),
    ]


def test_rounds_that_only_average_cost_nothing() -> None:
    """L2GD's coin is known to all."""
    method = ft.L2GD(p=0.5, lam=0.1, opt=OPT)
    fed = federation(SIZES)
    plan = make_plan(method, build_task("linear", fed, 0, fed.train.x.dtype, True), fed, 8, 3, "uniform")
    coins = [the_round(seed=3).uniform("L2GD", n) < 0.5 for n in range(30)]
    assert 0 < sum(coins) < 30
    assert visits_of(plan, 30, 3).tolist() == [30 - sum(coins)] * 3


def test_the_summary_counts_the_rounds_a_client_took_part_in() -> None:
    fed, method = federation([20, 40, 30, 25]), ft.FedAvg(steps=3, lr=0.1, opt=Private(clip=0.8, noise=1.5, seed=1))
    done = ft.run(method, fed, rounds=7, batch_size=8, cohort=2, seed=5)
    took = np.zeros(4, int)
    for number in range(7):
        took[cohort_of(fed, method, 2, 5, number)] += 1
    assert took.sum() == 14
    assert len(set(took)) > 1
    each = [epsilon([Spend(8 / n, 3 * int(k))], 1.5, 1e-5) for n, k in zip((20, 40, 30, 25), took, strict=True)]
    found = done.summary
    assert found["epsilon"] == pytest.approx(np.mean(each))
    assert found["epsilon_max"] == max(each)
    assert (found["delta"], found["noise"], found["clip"]) == (1e-5, 1.5, 0.8)
    assert ft.run(ft.FedAvg(), fed, rounds=1).summary["epsilon"] is None
    assert ft.run(ft.FedAvg(opt=Private(noise=0.0, force=True)), fed, rounds=1).summary["epsilon"] is None


def test_a_run_with_a_target_spends_it_and_no_more() -> None:
    fed = federation([20, 40])
    method = ft.Ditto(steps=3, lr=0.1, opt=Private(clip=1.0, target_epsilon=3.0, delta=1e-4, seed=1))
    found = ft.run(method, fed, rounds=5, batch_size=8).summary
    assert 2.9 < found["epsilon_max"] <= 3.0
    assert found["delta"] == 1e-4
    assert f"noise={found['noise']!r}" in found["settings"]
    assert found["noise"] > 1
    again = ft.run(
        ft.Ditto(steps=3, lr=0.1, opt=Private(noise=found["noise"], delta=1e-4, seed=1)), fed, rounds=5, batch_size=8
    ).summary
    assert again["epsilon_max"] == found["epsilon_max"]
    assert again["loss_personal"] == found["loss_personal"]


def test_newcomers_spend_on_their_own_account() -> None:
    fed = federation([20] * 4)
    found = ft.run(ft.FedAvg(steps=3, opt=OPT), fed, rounds=6, batch_size=8, new_clients=0.25).summary
    assert found["new_epsilon"] == epsilon([Spend(0.4, 3)], 2.0, 1e-5)
    assert found["epsilon"] == epsilon([Spend(0.4, 18)], 2.0, 1e-5)


# -- several runs on the same rows ----------------------------------------------------------------------------------------
def by_hand(events: list[tuple[float, float, int]], delta: float) -> float:
    """dp-accounting on (noise, sampling probability, steps), composed one after another."""
    total = None
    for noise, q, steps in events:
        one = pld.privacy_loss_distribution.from_gaussian_mechanism(noise, sampling_prob=q, value_discretization_interval=1e-3)
        total = one.self_compose(steps) if total is None else total.compose(one.self_compose(steps))
    assert total is not None
    return float(total.get_epsilon_for_delta(delta))


@pytest.mark.parametrize("noises", [(2.0, 2.0), (2.0, 5.0), (1.5, 3.0, 4.0)])
def test_a_comparison_spends_what_its_runs_spend_together(noises: tuple[float, ...]) -> None:
    fed = federation([20, 40])
    methods = {f"FedAvg {i}": ft.FedAvg(steps=3, opt=Private(noise=noise, delta=1e-3)) for i, noise in enumerate(noises)}
    compared = ft.compare(methods, fed, rounds=4, batch_size=8, evaluate_every=0, seeds=2)
    events = [(noise, 0.4, 12) for noise in noises for _ in range(2)]
    row = compared.table()[0]
    assert row["epsilon_composed"] == pytest.approx(by_hand(events, 1e-3), abs=0.02)
    assert row["epsilon_max"] == pytest.approx(by_hand(events[:1], 1e-3), abs=0.02)
    assert row["epsilon_composed_mean"] < row["epsilon_composed"]


def test_on_all_rows_a_comparison_is_one_gaussian_mechanism() -> None:
    fed = federation([20, 40])
    methods = [ft.FedAvg(steps=2, opt=Private(noise=6.0, delta=1e-3)), ft.Local(steps=2, opt=Private(noise=3.0, delta=1e-3))]
    spent = ft.compare(methods, fed, rounds=3, evaluate_every=0).privacy["epsilon_composed"]
    exact = dp.get_epsilon_gaussian(1 / math.sqrt(6 / 36 + 6 / 9), 1e-3)
    assert exact <= spent <= exact + 0.01


def test_trials_of_tuning_are_counted(tmp_path: Path) -> None:
    fed = federation([20, 40], val=True)
    method = ft.FedAvg(steps=1, lr=0.1, opt=Private(noise=5.0, delta=1e-3))
    options = {"rounds": 4, "batch_size": 8, "evaluate_every": 0}
    with pytest.warns(UserWarning, match="trials of tuning look at the clients' rows too"):  # never in silence
        tuned = ft.compare([method], fed, tune={"lr": [0.1, 0.2]}, out=tmp_path / "c", **options)
    played = sum(trial["rounds"] for trial in tuned.tuning["FedAvg"]["trials"]) + 4
    assert played > 4
    assert tuned.privacy["epsilon_composed"] == pytest.approx(by_hand([(5.0, 0.4, played)], 1e-3), abs=0.02)
    record = folder.read(tmp_path / "c")["FedAvg"][0]
    assert record.summary["epsilon_composed"] == tuned.privacy["epsilon_composed"]


def test_without_privacy_nothing_is_composed() -> None:
    assert ft.compare([ft.FedAvg()], federation([9, 8]), rounds=1).privacy == {}
