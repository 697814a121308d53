"""``lr="theory"``: PARTIAL's steps for the problem at hand, against constants by hand, and runs that keep the theorems."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.engine.rounds import play
from fedtailor.engine.setup import build_task, make_plan
from fedtailor.engine.vectorized import VectorizedEngine
from fedtailor.errors import InvalidArgument
from fedtailor.runs.store import Store
from fedtailor.theory.partial import PartialSteps, fedavgp_full_bound, fedavgp_partial_bound, scaffoldp_partial_bound
from fedtailor.theory.rates import split_constants
from fedtailor.theory.resolve import resolve
from tests.make import federation

NAMES = ("lr", "personal_lr", "server_lr", "personal_server_lr")
LOG2 = math.log(2)


def steps_of(method, fed, model="linear", rounds=1, cohort=1.0, **options):
    run = ft.run(method, fed, model, rounds=rounds, cohort=cohort, dtype="float64", evaluate_every=0, **options)
    return tuple(getattr(run.algorithm, name) for name in NAMES)


def line():
    """Slope shared, intercept personal. |A'A/n| is 4 and 1, |B'B/n| is 1: L = 4. At zero f is 1/2 and 5/2, and the slopes in u
    are -2 and -1."""
    pairs = [([[2.0], [-2.0]], [1.0, -1.0]), ([[1.0], [-1.0]], [3.0, 1.0])]
    return ft.Federation.from_arrays(pairs, pairs, task="regression")


def split():
    """Binary, first feature shared. |A'A/n| is 4 and 1, |B'B/n| is 1 and 9: L = 9/4. At zero f is log 2, and the slopes in u are
    -mean (y - 1/2) a = -1 and 0."""
    pairs = [([[2.0, 1.0], [-2.0, 1.0]], [1, 0]), ([[1.0, 3.0], [1.0, -3.0]], [0, 1])]
    return ft.Federation.from_arrays(pairs, pairs, task="classification")


# -- constants and steps by hand --------------------------------------------------------------------------------------------
def constants_of(fed, model, mine, batch_size=None, weight_decay=0.0, bias=True):
    fed = fed.to(torch.float64)
    return split_constants(build_task(model, fed, 0, torch.float64, bias), fed, mine, batch_size, weight_decay)


def test_constants_of_least_squares_by_hand():
    assert constants_of(line(), "linear", {"bias"}) == pytest.approx((4, 1.5, 2.5, 0, 0, math.inf))
    assert constants_of(line(), "linear", {"weight"}) == pytest.approx((4, 1.5, (0 + 4) / 2, 0, 0, math.inf))  # means of y: 0, 2
    assert constants_of(line(), "linear", {"weight", "bias"}) == pytest.approx((4, 1.5, 0, 0, 0, 0))
    smoothness, *_ = constants_of(line(), "linear", {"bias"}, weight_decay=0.5)
    assert smoothness == pytest.approx(4.5)
    noisy = constants_of(line(), "linear", {"bias"}, batch_size=1)
    assert (noisy.sigma_u2, noisy.sigma_v2) == (math.inf, math.inf)


def test_constants_of_logistic_regression_by_hand():
    mine = {"features.weight"}
    assert constants_of(split(), "split-linear:1", mine) == pytest.approx((9 / 4, LOG2, 0.5, 0, 0, (4 + 1) / 2))
    noisy = constants_of(split(), "split-linear:1", mine, batch_size=1)
    assert (noisy.sigma_u2, noisy.sigma_v2) == (4, 9)
    # softmax on two classes: curvature 1/2 of |X'X/n| (4 and 9 here), squared slope 2
    both = constants_of(split(), "linear", (), bias=False)
    assert (both.L, both.gap) == pytest.approx((9 / 2, LOG2))
    assert both.b2 == pytest.approx((2 * 5 + 2 * 10) / 2)  # every row of the clients has length sqrt 5, or sqrt 10


def test_constants_of_several_labels_by_hand():
    pairs = [([[2.0], [-2.0], [2.0]], [[1, 0], [0, 0], [1, 1]])]
    fed = ft.Federation.from_arrays(pairs, pairs, task="multilabel")
    # the risk is the mean over two sigmoids: curvature 1/8, squared slope 1/2; the smallest batch of 2 out of 3 rows has one
    assert constants_of(fed, "linear", {"bias"}, 2) == pytest.approx((0.5, LOG2, constants_start(pairs), 2, 0.5, 2))


def constants_start(pairs):
    x, y = (np.array(part, float) for part in pairs[0])
    return float(((x.T @ (0.5 - y) / len(x) / 2) ** 2).sum())


def test_with_all_clients_fedavgp_takes_theorem_3_11s_steps():
    method = ft.FedAvgP(lr="theory", personal=["bias"], steps=5)
    assert steps_of(method, line(), rounds=7) == pytest.approx((1 / 11760, 1 / 1680, 7, 1))  # 84 L K = 1680, eta_u = T
    assert steps_of(method, line(), rounds=1)[2] == pytest.approx(math.sqrt(2))  # sqrt(n) > sqrt(2.5/(4 * 1.5)) and T
    noisy = ft.FedAvgP(lr="theory", personal="features", steps=2)
    gamma = 1 / (84 * 9 / 4 * 2 + math.sqrt(11 * 9 / 4 * 2 * 10 * (4 / 2 + 9) / LOG2))
    assert steps_of(noisy, split(), "split-linear:1", 10, batch_size=1) == pytest.approx((gamma / 10, gamma, 10, 1))


def test_with_some_clients_fedavgp_takes_corollary_3_8s_steps_or_theorem_3_7s():
    method = ft.FedAvgP(lr="theory", personal=["bias"], steps=5)
    wanted = (1 / 640, 1 / 640 / math.sqrt(2), 1, math.sqrt(2))  # 32 L K = 640: least squares has no bound on b^2
    assert steps_of(method, line(), rounds=7, cohort=0.5) == pytest.approx(wanted)
    method = ft.FedAvgP(lr="theory", personal="features", steps=2)
    gamma = 1 / (32 * 9 / 4 * 2 + math.sqrt(3 * 9 / 4 * 2 * 10 * 10 / LOG2))  # A = 4 (2 - 1) 2 * 2.5/(1 * 2) = 10
    eta = math.sqrt(2.5 * 10 / (9 / 4 * LOG2))
    assert eta > 1
    wanted = (gamma / eta, gamma / math.sqrt(2), eta, math.sqrt(2))
    assert steps_of(method, split(), "split-linear:1", 10, cohort=0.5) == pytest.approx(wanted)


def test_scaffoldp_takes_theorem_4_5s_and_corollary_4_6s_steps():
    method = ft.ScaffoldP(lr="theory", personal=["bias"], steps=5)
    root = math.sqrt(2)
    assert steps_of(method, line(), rounds=7) == pytest.approx((1 / 1440 / root, 1 / 1440, root, 1))  # 72 L K = 1440
    gamma = 1 / (1440 * 2 ** (2 / 3))
    assert steps_of(method, line(), rounds=7, cohort=0.5) == pytest.approx((gamma, gamma / root, 1, root))
    method = ft.ScaffoldP(lr="theory", personal="features", steps=2)
    gamma = 1 / (72 * 4.5 + math.sqrt(37 * 4.5 * 9 * (4 / 2 + 9) / LOG2))  # the roll call is not one of the T = 9 rounds
    wanted = (gamma / root, gamma, root, 1)
    assert steps_of(method, split(), "split-linear:1", 10, batch_size=1) == pytest.approx(wanted)


def test_an_epoch_of_full_batches_is_one_step_and_numbers_are_left_alone():
    assert steps_of(ft.FedAvgP(lr="theory", personal=["bias"], epochs=5), line(), rounds=7)[1] == pytest.approx(1 / 1680)
    plain = ft.FedAvgP(lr=0.3, personal=["bias"])
    fed = line().to(torch.float64)
    assert resolve(plain, build_task("linear", fed, 0, torch.float64, True), fed)[0] is plain


# -- runs -------------------------------------------------------------------------------------------------------------------
N, ROUNDS, LOCAL = 6, 60, 4


def rows(kind):
    """Clients that differ in both parts: three shared features, two personal ones."""
    draw = np.random.default_rng(9)
    u, out = draw.normal(size=3), []
    for _ in range(N):
        x = draw.normal(size=(10, 5))
        z = x[:, :3] @ (u + draw.normal(size=3)) + x[:, 3:] @ draw.normal(size=2)
        out.append((x, z if kind == "regression" else (z + draw.normal(size=10) > 0).astype(int)))
    return out


def logistic(data, u, v):
    """(f, the grad_u f_i, the grad_v f_i) of the split model."""
    value, by_u, by_v = 0.0, [], []
    for (x, y), w in zip(data, v, strict=True):
        z = x[:, :3] @ u + x[:, 3:] @ w
        slope = (1 / (1 + np.exp(-z)) - y) / len(y)
        value += float((np.logaddexp(0, z) - y * z).mean()) / N
        by_u.append(x[:, :3].T @ slope)
        by_v.append(x[:, 3:].T @ slope)
    return value, np.stack(by_u), np.stack(by_v)


def squares(data, u, v):
    """(f, the grad_u f_i, the grad_v f_i) of least squares with a shared slope and a personal intercept."""
    value, by_u, by_v = 0.0, [], []
    for (x, y), c in zip(data, v, strict=True):
        r = x @ u + c - y
        value += float((r**2).mean()) / 2 / N
        by_u.append(x.T @ r / len(y))
        by_v.append(np.array([r.mean()]))
    return value, np.stack(by_u), np.stack(by_v)


def followed(method, data, model, problem, m, parts):
    """(resolved method, f before the rounds and after, the mean over rounds of G_u + (m/n) G_v at their start, largest b^2)."""
    fed = ft.Federation.from_arrays(data, data)
    run = ft.run(method, fed, model, rounds=ROUNDS + method.roll_call, cohort=m, dtype="float64", evaluate_every=0)
    plan = make_plan(run.algorithm, run.task, run.federation, None, 0, "uniform")
    start = run.task.init()
    u, v = start[parts[0]].numpy().ravel(), np.tile(start[parts[1]].numpy().ravel(), (N, 1))
    shared, server = run.algorithm.init_server(run.task)
    store, values, norms, b2 = Store(N), [], [], 0.0
    for rnd, now in play(VectorizedEngine(plan), shared, server, store, ROUNDS + method.roll_call, m):
        if not (method.roll_call and rnd.number == 0):
            value, by_u, by_v = problem(data, u, v)
            values.append(value)
            norms.append((by_u.mean(0) ** 2).sum() + m / N * (by_v**2).sum(1).mean())
            b2 = max(b2, float(by_u.var(0).sum()))
        u = now[0]["model"][parts[0]].numpy().ravel()
        met = np.flatnonzero(store.born)
        v[met] = store.get(met)["model"][parts[1]].numpy().reshape(len(met), -1)
    assert len(norms) == ROUNDS
    return run.algorithm, values[0], problem(data, u, v)[0], float(np.mean(norms)), b2


CASES = {
    "split-linear:3": ("classification", logistic, "features", ("common.weight", "features.weight")),
    "linear": ("regression", squares, ["bias"], ("weight", "bias")),
}


def largest(model, data):
    """L by hand: the larger block of the Hessian's bound."""
    blocks = [(x[:, :3], x[:, 3:]) if model != "linear" else (x, np.ones((len(x), 1))) for x, _ in data]
    curvature = 1.0 if model == "linear" else 0.25
    return curvature * max(np.linalg.eigvalsh(part.T @ part / len(part))[-1] for pair in blocks for part in pair)


def as_steps(method):
    four = [getattr(method, name) for name in NAMES]
    return PartialSteps(*four, method.lr * method.server_lr)


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("m", [2, 6])
@pytest.mark.parametrize("kind", [ft.FedAvgP, ft.ScaffoldP])
def test_with_the_theorys_steps_the_risk_falls_and_the_theorem_holds(kind, m, model):
    targets, problem, personal, parts = CASES[model]
    data = rows(targets)
    method, before, after, mean, b2 = followed(kind(lr="theory", personal=personal, steps=LOCAL), data, model, problem, m, parts)
    L, quiet = largest(model, data), {"sigma_u2": 0.0, "sigma_v2": 0.0}
    steps = as_steps(method)
    if kind is ft.ScaffoldP:
        bound = scaffoldp_partial_bound(steps, L, LOCAL, m, N, ROUNDS, before, **quiet)
    elif m < N:
        bound = fedavgp_partial_bound(steps, L, LOCAL, m, N, ROUNDS, before, b2=b2, **quiet)
    else:
        start2 = float((problem(data, *zeros(model))[1] ** 2).sum(1).mean())
        bound = fedavgp_full_bound(steps, L, LOCAL, N, ROUNDS, before, start2, **quiet)
    assert mean <= bound
    assert after < before


def zeros(model):
    return (np.zeros(3), np.zeros((N, 2))) if model != "linear" else (np.zeros(5), np.zeros((N, 1)))


# -- refusals ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (ft.FedAvgP(lr="theory"), {"model": "mlp:4"}, "known for the models 'linear' and 'split-linear' only; give lr a number"),
        (ft.ScaffoldP(lr="theory", personal=["bias"]), {"weights": "size"}, "use weights='uniform'"),
        (ft.FedAvgP(lr="theory", personal=["bias"], opt=ft.SGD(momentum=0.9)), {}, "leave out momentum"),
        (ft.FedAvgP(lr="theory", personal=["bias"], opt=ft.Adam()), {}, "plain SGD"),
        (ft.FedAvgP(lr="theory", personal=["bias"], radius=1.0), {}, "leave out momentum, Adam and radius"),
        (ft.FedAvgP(lr="theory", personal=["bias"], server_lr=2.0), {}, "sets all step sizes; leave out"),
        (ft.FedAvgP(lr="theory", personal=["bias"], personal_lr=0.1), {}, "sets all step sizes; leave out"),
        (ft.FedAvgP(lr="theory", personal=["bias"], epochs=1), {"batch_size": 4}, "the same number of local steps"),
        (ft.FedAvgP(lr="theory", personal=["bias"], steps=2), {"batch_size": 4}, "least squares has none; use batch_size=None"),
        (ft.ScaffoldP(lr="theory", personal=["bias"], first="zeros"), {}, "leave out first"),
    ],
)
def test_refuses_with_a_fix(method, options, words):
    fed = federation([5, 9], kind="regression")
    with pytest.raises(InvalidArgument, match=words) as caught:
        ft.run(method, fed, rounds=1, **options)
    assert "\n" not in str(caught.value)


def test_only_methods_with_such_a_theorem_take_the_word():
    with pytest.raises(InvalidArgument, match="lr must be a number, not 'theory'"):
        ft.FedAvg(lr="theory")
    with pytest.raises(InvalidArgument, match="lr must be a number or 'theory', not 'thoery'"):
        ft.FedAvgP(lr="thoery")
    with pytest.raises(InvalidArgument, match=r"known only once there are data; use ft\.run"):
        ft.FedAvgP(lr="theory").optimizer()


def test_a_model_that_only_looks_linear_is_refused():
    class Bent(torch.nn.Linear):
        def forward(self, input):
            return torch.sin(super().forward(input))

    with pytest.raises(InvalidArgument, match="give lr a number"):
        ft.run(ft.FedAvgP(lr="theory", personal=["bias"]), federation([5, 6], kind="regression"), Bent(3, 1), rounds=1)
