"""Error over lam: the exact solution, its validation loss, the estimated distance and the bound against closed forms."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.advisor.curves import curves, facts, place
from fedtailor.data.split import Split
from fedtailor.engine.setup import build_task
from fedtailor.theory import heterogeneity
from fedtailor.theory.envelope import solve

D, M = 3, 5


def identity(seed=0):
    """Clients whose X'X/n is the identity, so that f_i(w) = |w - v_i|^2/2 + const; validation rows of no special form."""
    draw = np.random.default_rng(seed)
    x = np.concatenate([np.sqrt(D) * np.eye(D)] * 2)  # n = 2d rows: some to spare
    train = [(x, x @ draw.normal(size=D) + draw.normal(size=2 * D)) for _ in range(M)]
    val = [(draw.normal(size=(4, D)), draw.normal(size=4)) for _ in range(M)]
    return ft.Federation.from_arrays(train, val, val), train, val


def linear(fed, bias=False):
    return build_task("linear", fed, 0, torch.float64, bias)


def of(fed, bias=False, **options):
    fed = fed.to(torch.float64)
    task = linear(fed, bias)
    return curves(fed, task, heterogeneity.measure(task, fed), **options)


def test_on_an_identity_design_everything_has_a_closed_form():
    fed, train, val = identity()
    result = of(fed)
    assert result["weight_decay"] == 0
    n = 2 * D
    v = np.array([x.T @ y / n for x, y in train])
    noise = np.array([((y - x @ w) ** 2).sum() / (n - D) for (x, y), w in zip(train, v, strict=True)])
    measured, ends = result["measured"], result["ends"]
    cases = [(lam, {key: values[i] for key, values in measured.items() if values}) for i, lam in enumerate(measured["lam"])]
    everyone = [(0.0, ends["local"]), *cases, (np.inf, ends["shared"])]
    losses = []
    for lam, at in everyone:
        own = 1 / (1 + lam)
        models = own * v + (1 - own) * v.mean(0)
        loss = np.array([((y - x @ w) ** 2).mean() / 2 for (x, y), w in zip(val, models, strict=True)])
        losses.append(loss)
        assert at["loss"] == pytest.approx(loss.mean(), rel=1e-9)
        assert at["score"] == pytest.approx(2 * loss.mean(), rel=1e-9)
        share = own + (1 - own) / M  # how much of its own fit a client's model holds
        moved = ((models - v) ** 2).sum(1)
        assert at["distance"] == pytest.approx((moved + (2 * share - 1) * D * noise / n).mean(), rel=1e-9)
    best = losses[int(np.argmin([loss.mean() for loss in losses]))]
    for loss, (_, at) in zip(losses, everyone, strict=True):
        assert at["excess"] == pytest.approx((loss - best).mean(), rel=1e-7, abs=1e-12)
        assert at["se"] == pytest.approx((loss - best).std(ddof=1) / np.sqrt(M), rel=1e-7, abs=1e-12)


def test_the_bound_is_theorem_one_with_estimated_constants():
    fed, train, _ = identity(1)
    result = of(fed)
    n, N = 2 * D, 2 * D * M
    v = [x.T @ y / n for x, y in train]
    rho2 = max((((y - x @ w) ** 2) * (x**2).sum(1)).mean() for (x, y), w in zip(train, v, strict=True))
    task = linear(fed.to(torch.float64))
    r2 = heterogeneity.measure(task, fed.to(torch.float64)).r2
    assert result["constants"] == pytest.approx({"mu": 1, "L": 1, "rho2": rho2, "R2": r2, "n": n, "m": M, "N": N})
    bound = result["bound"]
    for lam, shared, local, least in zip(*(bound[k] for k in ("lam", "shared", "local", "bound")), strict=True):
        assert local == pytest.approx(4 * rho2 / n + (4 * rho2 / n + 4 * r2) * lam + 8 * r2 * lam**2)
        g = 4 * (1 / (1 + lam) + 1 / (1 + lam) ** 2)
        assert (shared is None) == (8 * g > 1)
        if shared is None:
            assert least == local
            continue
        rest = g / (1 - 4 * g) * (4 * r2 + 2 * rho2 / n)
        inverse = 12 / (1 + lam) ** 2 * (4 * r2 + 2 * rho2 / n)
        inverse += 48 / (1 + lam) ** 2 * (rest + 16 * rho2 / N + 16 * r2) + 3 * rest
        assert shared == pytest.approx(48 * rho2 / N + 51 * r2 + inverse)
        assert least == min(shared, local)
    assert bound["shared"][-1] is not None  # both branches are in the picture
    assert bound["shared"][0] is None


@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_the_estimated_distance_moves_as_the_solution_does(weights):
    """Cov(w_i, v_i) = (dw_i/dv_i) V_i, and the derivative is what solving again with a client's labels moved by X e_k gives."""
    draw = np.random.default_rng(3)
    train = [(x := draw.normal(size=(n, 2)), x @ draw.normal(size=2) + draw.normal(size=n)) for n in (7, 12, 20)]
    val = [(draw.normal(size=(3, 2)), draw.normal(size=3)) for _ in train]
    fed = ft.Federation.from_arrays(train, val, val).to(torch.float64)
    result, task = of(fed, weights=weights), linear(fed)
    picked = len(result["measured"]["lam"]) // 2
    wanted = [(0.0, result["ends"]["local"]["distance"]), (np.inf, result["ends"]["shared"]["distance"])]
    wanted.append((result["measured"]["lam"][picked], result["measured"]["distance"][picked]))
    for lam, distance in wanted:
        at = _weights(solve(task, fed, lam, weights=weights))
        total = 0.0
        for i, (x, y) in enumerate(train):
            own, rest, *_ = np.linalg.lstsq(x, y)
            V = rest[0] / (len(y) - 2) * np.linalg.inv(x.T @ x)
            J = np.empty((2, 2))
            for k in range(2):
                moved = [(a, b + x[:, k] if j == i else b) for j, (a, b) in enumerate(train)]
                other = ft.Federation.from_arrays(moved, val, val).to(torch.float64)
                J[:, k] = _weights(solve(task, other, lam, weights=weights))[i] - at[i]
            total += ((at[i] - own) ** 2).sum() - np.trace(V) + 2 * np.trace(J @ V)
        assert distance == pytest.approx(total / 3, rel=1e-7)


def _weights(solution):
    return np.array([model["weight"].numpy()[0] for model in solution.models])


def test_the_true_distance_is_that_of_the_solution_and_below_the_bound():
    draw = np.random.default_rng(4)
    truth = draw.normal(size=3) + 0.3 * draw.normal(size=(10, 3))
    rows = [(x := draw.normal(size=(30, 3)), x @ w + draw.normal(size=30)) for w in truth]
    fed = ft.Federation.from_arrays(rows, rows, rows).to(torch.float64)
    fed = replace(fed, truth=[{"weight": torch.tensor(w)[None]} for w in truth])
    result = of(fed, bias=True)  # a bias that the truth does not have is zero there
    own = [np.linalg.lstsq(np.c_[x, np.ones(30)], y)[0] for x, y in rows]
    local = np.mean([((w - np.r_[t, 0]) ** 2).sum() for w, t in zip(own, truth, strict=True)])
    assert result["ends"]["local"]["true"] == pytest.approx(local, rel=1e-7)
    bound = np.interp(np.log(result["measured"]["lam"]), np.log(result["bound"]["lam"]), result["bound"]["bound"])
    assert (np.array(result["measured"]["true"]) < bound).all()


def test_what_is_added_to_all_classes_changes_no_distance():
    draw = np.random.default_rng(5)
    rows = [(draw.normal(size=(40, 2)), draw.integers(0, 3, 40)) for _ in range(3)]
    fed = ft.Federation.from_arrays(rows, rows, rows).to(torch.float64)
    w = torch.tensor(draw.normal(size=(3, 2)))
    distances = [of(replace(fed, truth=[{"weight": w + shift}] * 3), bias=True)["ends"]["shared"]["true"] for shift in (0.0, 7.0)]
    assert distances[0] == pytest.approx(distances[1], rel=1e-9)


def test_classes_are_solved_with_a_little_decay_and_judged_by_accuracy():
    draw = np.random.default_rng(6)
    rows = [(draw.normal(size=(30, 2)), draw.integers(0, 2, 30)) for _ in range(4)]
    fed = ft.Federation.from_arrays(rows, rows, rows).to(torch.float64)
    result = of(fed, bias=True)
    assert result["score"] == "acc"
    assert result["measured"]["distance"] is None
    task = linear(fed, bias=True)
    one = solve(task, fed, np.inf, weight_decay=result["weight_decay"]).g
    w, b = one["weight"].numpy(), one["bias"].numpy()
    hits = np.mean([((x @ w.T + b).argmax(1) == y).mean() for x, y in rows])
    assert result["ends"]["shared"]["score"] == pytest.approx(hits)
    top = max(np.linalg.eigvalsh(np.c_[x, np.ones(30)].T @ np.c_[x, np.ones(30)] / 30)[-1] for x, _ in rows)
    assert result["weight_decay"] == pytest.approx(1e-3 * top / 2)  # of the softmax's smoothness


def test_a_column_without_curvature_is_regularised():
    draw = np.random.default_rng(7)
    rows = [(np.c_[draw.normal(size=20), np.ones(20)], draw.normal(size=20)) for _ in range(4)]  # a constant beside the bias
    result = of(ft.Federation.from_arrays(rows, rows, rows), bias=True)
    assert result["weight_decay"] > 0
    assert result["measured"]["distance"] is None  # no client has a fit of its own
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_a_client_without_rows_to_spare_is_left_out_of_the_distance():
    draw = np.random.default_rng(8)
    rows = [(x := draw.normal(size=(n, 3)), x @ np.ones(3) + draw.normal(size=n)) for n in (3, 20, 20, 20)]
    result = of(ft.Federation.from_arrays(rows, rows, rows))
    assert set(result["measured"]["distance_of"]) == {3}


def test_what_cannot_be_solved_exactly_is_not_drawn():
    fed, _, _ = identity()
    assert curves(fed, build_task("mlp", fed, 0, torch.float64, True), None) is None
    with pytest.raises(ft.errors.InvalidArgument, match="validation rows"):
        curves(replace(fed, val=None), linear(fed), None)
    draw = np.random.default_rng(9)
    wide = [(draw.normal(size=(5, 400)), np.arange(5) % 5) for _ in range(3)]
    fed = ft.Federation.from_arrays(wide, wide, wide)
    with pytest.raises(ft.errors.InvalidArgument, match="1604 parameters of 3 clients takes too long"):
        curves(fed, build_task("linear", fed, 0, torch.float64, True), None)


def test_without_r2_there_is_no_bound_but_the_measured_curve():
    fed, _, _ = identity()
    result = curves(fed.to(torch.float64), linear(fed.to(torch.float64)), None)
    assert result["bound"] is None
    assert result["constants"] is None
    assert result["measured"]["excess"]


def test_the_facts_of_the_page_do_not_look_at_test_rows():
    draw = np.random.default_rng(10)
    rows = [(x := draw.normal(size=(30, 2)), x @ draw.normal(size=2) + draw.normal(size=30)) for _ in range(4)]
    fed = ft.Federation.from_arrays(rows, rows)  # validation rows are set apart from training
    advice = ft.advise(fed, rounds=10)
    empty = replace(fed, test=Split(torch.zeros_like(fed.test.x), torch.zeros_like(fed.test.y), fed.test.offsets))
    page = facts(fed, "linear", advice)
    assert page == facts(empty, "linear", advice)
    assert page["map"] == {"m": 4, "N": 96, "rows": {"least": 24, "median": 24.0, "most": 24}}


def test_the_map_counts_the_clients_that_r2_is_about():
    fed, _, _ = identity()
    estimate = heterogeneity.measure(linear(fed.to(torch.float64)), fed.to(torch.float64))
    assert place(fed, replace(estimate, left_out=(fed.names[0],)))["N"] == (M - 1) * 2 * D
    assert place(fed, None)["m"] == M
