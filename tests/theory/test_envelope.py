"""Problem (2) exactly: fractions by hand, dense systems, scipy's root of the optimality conditions, limits and laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import root
from scipy.special import expit, softmax

import fedtailor as ft
from fedtailor.engine.setup import build_task
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.theory.envelope import TOLERANCE, solve, solve_path
from tests.make import pairs

SIZES = (12, 30, 17)


def made(fed, bias=True, model="linear"):
    fed = fed.to(torch.float64)
    return build_task(model, fed, 0, torch.float64, bias), fed


def line():
    """f_1 = (w - 0)^2/2 and f_2 = 4 (w - 3)^2/2."""
    data = [([[1.0]], [0.0]), ([[2.0]], [6.0])]
    return made(ft.Federation.from_arrays(data, data, task="regression"), bias=False)


def some(kind, classes=3, seed=0, outputs=2):
    draw = np.random.default_rng(seed)
    data = pairs(SIZES, 3, kind if kind != "multilabel" else "classification", seed, classes)
    if kind == "multilabel":
        data = [(x, draw.integers(0, 2, (len(x), outputs))) for x, _ in data]
    if kind == "regression":
        data = [(x, y + i) for i, (x, y) in enumerate(data)]
    return made(ft.Federation.from_arrays(data, data, task=kind)), data


def numbers(model):
    return np.concatenate([model["weight"].numpy(), model["bias"].numpy()[:, None]], 1)


# -- by hand ----------------------------------------------------------------------------------------------------------------
def test_two_parabolas_by_hand():
    task, fed = line()
    solution = solve(task, fed, 4.0)
    # lam a/(lam + a) is 4/5 and 2: g = (0 * 4/5 + 3 * 2)/(14/5) = 15/7, w_1 = 4 g/5, w_2 = (12 + 4 g)/8
    assert float(solution.g["weight"]) == pytest.approx(15 / 7, abs=1e-14)
    assert [float(w["weight"]) for w in solution.models] == pytest.approx([12 / 7, 18 / 7], abs=1e-14)
    assert solution.objective == pytest.approx(9 / 7, abs=1e-14)
    assert solution.relative <= 1e-14


def test_two_parabolas_with_weights_and_decay_by_hand():
    task, fed = line()
    # decay 1: f_1 + w^2/2 = 2 w^2/2, f_2 + w^2/2 = 5 (w - 12/5)^2/2 + const; with lam = 5 the curvatures are 10/7 and 5/2
    solution = solve(task, fed, 5.0, weights=[3.0, 1.0], weight_decay=1.0)
    g = (1 * 5 / 2 * 12 / 5) / (3 * 10 / 7 + 5 / 2)
    assert float(solution.g["weight"]) == pytest.approx(g, abs=1e-14)
    assert [float(w["weight"]) for w in solution.models] == pytest.approx([5 * g / 7, (12 + 5 * g) / 10], abs=1e-14)


def test_clients_of_different_degree_by_hand():
    task, fed = line()
    apart = solve(task, fed, [0.0, math.inf])  # the first is alone, so g is the second's own minimum
    assert [float(w["weight"]) for w in (*apart.models, apart.g)] == pytest.approx([0, 3, 3], abs=1e-14)
    mixed = solve(task, fed, [math.inf, 4.0])  # curvatures 1 and 2 about 0 and 3
    assert [float(w["weight"]) for w in (*mixed.models, mixed.g)] == pytest.approx([2, 2.5, 2], abs=1e-14)
    own = solve(task, fed.with_facts(lam=[1.0, 4.0]), "client")  # curvatures 1/2 and 2
    assert [float(w["weight"]) for w in (*own.models, own.g)] == pytest.approx([1.2, 2.7, 2.4], abs=1e-14)


def test_coordinates_of_a_diagonal_problem_do_not_meet():
    curves, aims = np.array([[1.0, 9.0], [4.0, 0.25]]), np.array([[2.0, -1.0], [0.0, 3.0]])
    rows = [np.diag(np.sqrt(2 * c)) for c in curves]  # X'X/2 = diag(c)
    data = [(x, x @ b) for x, b in zip(rows, aims, strict=True)]
    task, fed = made(ft.Federation.from_arrays(data, data, task="regression"), bias=False)
    for lam in (0.01, 1.0, 100.0):
        bent = lam * curves / (lam + curves)
        g = (bent * aims).sum(0) / bent.sum(0)
        solution = solve(task, fed, lam)
        assert solution.g["weight"].numpy()[0] == pytest.approx(g, abs=1e-13)
        for model, c, b in zip(solution.models, curves, aims, strict=True):
            assert model["weight"].numpy()[0] == pytest.approx((c * b + lam * g) / (c + lam), abs=1e-13)


# -- against independent computations ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("lam", [1e-4, 0.7, 1e5])
def test_least_squares_is_one_dense_system(lam, weights):
    (task, fed), data = some("regression")
    p = np.full(3, 1 / 3) if weights == "uniform" else np.array(SIZES) / sum(SIZES)
    size, decay = 4, 0.02
    matrix, right = np.zeros((4 * size, 4 * size)), np.zeros(4 * size)
    eye = np.eye(size)
    for i, (x, y) in enumerate(data):
        rows = np.c_[x, np.ones(len(x))]
        at, g = slice(i * size, (i + 1) * size), slice(3 * size, 4 * size)
        matrix[at, at] = p[i] * (rows.T @ rows / len(y) + (decay + lam) * eye)
        matrix[at, g] = matrix[g, at] = -p[i] * lam * eye
        matrix[g, g] += p[i] * lam * eye
        right[at] = p[i] * rows.T @ y / len(y)
    wanted = np.linalg.solve(matrix, right).reshape(4, size)
    solution = solve(task, fed, lam, weights=weights, weight_decay=decay)
    got = np.stack([numbers(m)[0] for m in (*solution.models, solution.g)])
    assert np.abs(got - wanted).max() < 1e-8
    assert solution.steps == 2  # the first solves it, the second takes off the rounding


def residual_of(kind):
    if kind == "classification":
        return lambda z, y: softmax(z, 1) - np.eye(z.shape[1])[y]
    if kind == "multilabel":
        return lambda z, y: (expit(z) - y) / z.shape[1]
    return lambda z, y: (z - y.reshape(z.shape)) / z.shape[1]


@pytest.mark.parametrize("lam", [0.05, 3.0])
@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression"])
def test_scipy_finds_the_same_point(kind, lam):
    (task, fed), data = some(kind)
    decay, p = 0.03, np.array([0.2, 0.5, 0.3])
    shape = (4, {"classification": 3, "multilabel": 2, "regression": 1}[kind], 4)
    residual = residual_of(kind)

    def conditions(flat):
        *models, g = flat.reshape(shape)
        out = []
        for w, (x, y) in zip(models, data, strict=True):
            rows = np.c_[x, np.ones(len(x))]
            out.append(residual(rows @ w.T, y).T @ rows / len(x) + decay * w + lam * (w - g))
        return np.stack([*out, sum(q * (g - w) for q, w in zip(p, models, strict=True))]).ravel()

    wanted = root(conditions, np.zeros(math.prod(shape)), tol=1e-13)
    assert np.abs(conditions(wanted.x)).max() < 1e-11
    solution = solve(task, fed, lam, weights=p, weight_decay=decay)
    got = np.stack([numbers(m) for m in (*solution.models, solution.g)])
    assert np.abs(got - wanted.x.reshape(shape)).max() < 1e-8


def test_fedclup_runs_into_it():
    fed = ft.Federation.load("clup-logistic", clients=4, rows=60, d=4, R=0.5)
    method = ft.FedCLUP(lam=0.5, steps="theory", opt=ft.SGD(weight_decay=0.05))
    run = ft.run(method, fed, rounds=150, dtype="float64", evaluate_every=0)
    task, fed = made(fed)
    solution = solve(task, fed, 0.5, weight_decay=0.05)
    assert np.abs(numbers(run.model()) - numbers(solution.g)).max() < 1e-8
    assert max(np.abs(numbers(run.model(i)) - numbers(solution.models[i])).max() for i in range(4)) < 1e-8


# -- limits, certificate, path ----------------------------------------------------------------------------------------------
def test_the_ends_of_lam_are_local_and_pooled_least_squares():
    (task, fed), data = some("regression")
    rows = [np.c_[x, np.ones(len(x))] for x, _ in data]
    own = [np.linalg.lstsq(x, y, rcond=None)[0] for x, (_, y) in zip(rows, data, strict=True)]
    local = solve(task, fed, 0.0)
    assert np.abs(np.stack([numbers(m)[0] for m in local.models]) - own).max() < 1e-12
    assert np.abs(numbers(local.g)[0] - np.mean(own, 0)).max() < 1e-12
    weighted = np.concatenate([x / math.sqrt(len(x)) for x in rows])
    aims = np.concatenate([y / math.sqrt(len(y)) for _, y in data])
    pooled = np.linalg.lstsq(weighted, aims, rcond=None)[0]
    one = solve(task, fed, math.inf)
    for model in (*one.models, one.g):
        assert np.abs(numbers(model)[0] - pooled).max() < 1e-12
    by_size = solve(task, fed, math.inf, weights="size")
    flat = np.linalg.lstsq(np.concatenate(rows), np.concatenate([y for _, y in data]), rcond=None)[0]
    assert np.abs(numbers(by_size.g)[0] - flat).max() < 1e-12


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_tiny_lam_is_nearly_local_and_a_huge_one_nearly_pooled(kind):
    (task, fed), _ = some(kind)
    ends = {lam: solve(task, fed, lam, weight_decay=0.01) for lam in (0.0, 1e-9, 1e12, math.inf)}
    for near, end in ((1e-9, 0.0), (1e12, math.inf)):
        for a, b in zip((*ends[near].models, ends[near].g), (*ends[end].models, ends[end].g), strict=True):
            assert np.abs(numbers(a) - numbers(b)).max() < 1e-6
        assert ends[near].objective == pytest.approx(ends[end].objective, abs=1e-6)


@pytest.mark.parametrize("lam", [0.0, 1e-6, 0.3, 1e6, 1e12])
@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression"])
def test_the_certificate_holds_the_clients_sums_of_pulls(kind, lam):
    (task, fed), _ = some(kind)
    solution = solve(task, fed, lam, weight_decay=0.01)
    assert solution.relative <= TOLERANCE
    slopes = [task.gradient(m, dict(zip("xy", fed.train.client(i), strict=True))) for i, m in enumerate(solution.models)]
    full = [numbers(s) + 0.01 * numbers(m) for s, m in zip(slopes, solution.models, strict=True)]
    for slope, gap in zip(full, solution.gaps, strict=True):  # every client's gradient balances its pull
        assert np.linalg.norm(slope) == pytest.approx(lam * float(gap.norm()), rel=1e-6, abs=1e-9)
    if lam:
        assert np.linalg.norm(sum(full) / 3) <= solution.gradient_norm + 1e-13


def test_a_softmax_is_pinned_by_zero_sums_without_decay():
    (task, fed), _ = some("classification")
    solution = solve(task, fed, 1.0)
    for model in (*solution.models, solution.g):
        assert np.abs(numbers(model).sum(0)).max() < 1e-12


def test_a_path_gives_every_lams_solution_in_the_order_asked_and_saves_steps():
    (task, fed), _ = some("classification")
    lams = [0.1, math.inf, 3.0, 0.3, 10.0, 1.0]
    path = solve_path(task, fed, lams, weight_decay=0.01)
    separate = [solve(task, fed, lam, weight_decay=0.01) for lam in lams]
    for a, b, lam in zip(path, separate, lams, strict=True):
        assert (a.lam == lam).all()
        assert np.abs(numbers(a.g) - numbers(b.g)).max() < 1e-9
        assert a.objective == pytest.approx(b.objective, abs=1e-12)
    assert sum(a.steps for a in path) < sum(a.steps for a in separate)


def test_along_lam_the_objective_and_the_risk_grow_and_the_gaps_shrink():
    for kind in ("classification", "regression"):
        (task, fed), _ = some(kind)
        lams = np.geomspace(1e-3, 1e3, 13)
        path = solve_path(task, fed, list(lams), weight_decay=0.01)
        values = np.array([s.objective for s in path])
        spread = np.array([float((s.gaps**2).sum()) / 3 for s in path])
        risk = values - lams * spread / 2
        assert (np.diff(values) > 0).all()
        assert (np.diff(spread) < 0).all()
        assert (np.diff(risk) > 0).all()
        slopes = np.diff(values) / np.diff(lams)  # a minimum over functions that are linear in lam is concave in it
        assert (np.diff(slopes) < 0).all()


def test_two_hundred_clients_of_different_sizes_are_solved_as_each_by_itself():
    draw = np.random.default_rng(0)
    sizes = draw.integers(61, 300, 200)
    data = [(x := draw.normal(size=(n, 60)), x @ draw.normal(size=60) + draw.normal(size=n)) for n in sizes]
    task, fed = made(ft.Federation.from_arrays(data, [(x[:1], y[:1]) for x, y in data], task="regression"), bias=False)
    solution = solve(task, fed, 0.5)
    assert solution.relative < 1e-13
    g = solution.g["weight"].numpy()[0]
    for i in (0, 99, 199):
        x, y = data[i]
        w = np.linalg.solve(x.T @ x / len(y) + 0.5 * np.eye(60), x.T @ y / len(y) + 0.5 * g)
        assert np.abs(solution.models[i]["weight"].numpy()[0] - w).max() < 1e-10
    assert np.abs(np.mean([m["weight"].numpy()[0] for m in solution.models], 0) - g).max() < 1e-12


def test_hessians_that_do_not_fit_at_once_give_the_same(monkeypatch):
    (task, fed), _ = some("classification")
    whole = solve(task, fed, 0.5, weight_decay=0.01)
    monkeypatch.setattr("fedtailor.theory.pulled.ROOM", 70)
    assert np.abs(numbers(solve(task, fed, 0.5, weight_decay=0.01).g) - numbers(whole.g)).max() < 1e-13


# -- refusals ---------------------------------------------------------------------------------------------------------------
def test_a_network_is_refused():
    fed = ft.Federation.from_arrays(pairs(SIZES), pairs(SIZES), task="classification").to(torch.float64)
    with pytest.raises(InvalidArgument, match="not convex"):
        solve(build_task("mlp", fed, 0, torch.float64, True), fed, 1.0)


def test_risks_without_a_minimum_are_refused_by_name():
    data = [([[1.0, 0.0]], [1.0]), ([[0.0, 1.0]], [1.0])]
    names = ["north", "south"]
    task, fed = made(ft.Federation.from_arrays(data, data, task="regression", names=names), bias=False)
    with pytest.raises(InvalidData, match="client north has no unique minimum"):
        solve(task, fed, 0.0)
    assert solve(task, fed, 1.0).g["weight"].numpy()[0] == pytest.approx([1, 1])  # together they are enough
    task, fed = made(ft.Federation.from_arrays(data[:1] * 2, data[:1] * 2, task="regression"), bias=False)
    with pytest.raises(InvalidData, match="together have no unique minimum"):
        solve(task, fed, 1.0)


@pytest.mark.parametrize("lam", [0.0, 1.0, math.inf])
def test_separable_labels_need_weight_decay(lam):
    data = [([[-2.0], [-1.0], [1.0], [3.0]], [0, 0, 1, 1])] * 2
    task, fed = made(ft.Federation.from_arrays(data, data, task="classification"), bias=False)
    with pytest.raises(InvalidData, match="add weight_decay"):
        solve(task, fed, lam)
    assert solve(task, fed, lam, weight_decay=1e-3).relative <= TOLERANCE


@pytest.mark.parametrize(
    ("lam", "options", "words"),
    [
        (-1.0, {}, "at least 0"),
        (math.nan, {}, "at least 0"),
        ([1.0], {}, "one number per client"),
        ("often", {}, "with_facts"),
        ("client", {}, "with_facts"),
        (1.0, {"weights": "rows"}, "uniform"),
        (1.0, {"weights": [1.0, 0.0, 1.0]}, "greater than 0"),
        (1.0, {"weights": ["a", 1, 2]}, "must be numbers"),
        (1.0, {"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(lam, options, words):
    (task, fed), _ = some("regression")
    with pytest.raises(InvalidArgument, match=words) as refused:
        solve(task, fed, lam, **options)
    assert "\n" not in str(refused.value)


def test_a_task_or_start_of_other_data_is_refused():
    (task, fed), _ = some("regression")
    (other, labelled), _ = some("classification")
    with pytest.raises(InvalidArgument, match="the data are for classification"):
        solve(task, labelled, 1.0)
    with pytest.raises(InvalidArgument, match="another problem"):
        solve(task, fed, 1.0, start=solve(other, labelled, 1.0))
