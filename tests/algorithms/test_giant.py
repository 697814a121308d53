"""GIANT: one round is Newton's step on least squares, the mean of local directions in general, and its line search."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.algorithms.giant import longest
from fedtailor.errors import InvalidArgument
from tests.make import pairs

OPTIONS = {"dtype": "float64", "evaluate_every": 0, "workers": 1}


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("batch_size", [None, 7])
def test_one_round_reaches_the_minimiser_of_least_squares_where_hessians_are_equal(engine, batch_size):
    """Clients with the same features and different targets: the mean's minimiser, with a ridge, in closed form."""
    x = np.random.default_rng(0).normal(size=(20, 4))
    targets = [x @ np.random.default_rng(i).normal(size=4) for i in range(3)]
    clients = [(x, y) for y in targets]
    fed = ft.Federation.from_arrays(clients, clients, task="regression")
    method = ft.GIANT(cg_steps=4, ridge=0.3)
    run = ft.run(method, fed, "linear", rounds=1, bias=False, engine=engine, batch_size=batch_size, **OPTIONS)
    want = np.linalg.solve(x.T @ x / 20 + 0.3 * np.eye(4), x.T @ np.mean(targets, 0) / 20)
    np.testing.assert_allclose(run.shared["model"]["weight"][0], want, atol=1e-10)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_round_moves_by_the_mean_of_local_newton_directions(engine):
    clients = pairs((12, 20), d=3, kind="regression")
    fed = ft.Federation.from_arrays(clients, clients, task="regression")
    method = ft.GIANT(lr=0.5, cg_steps=3, ridge=0.0, damping=0.1)
    run = ft.run(method, fed, "linear", rounds=1, bias=False, engine=engine, batch_size=None, weights="size", **OPTIONS)
    share = np.array([12, 20]) / 32
    g = sum(p * -x.T @ y / len(y) for p, (x, y) in zip(share, clients, strict=True))
    hessians = [x.T @ x / len(x) + 0.1 * np.eye(3) for x, _ in clients]
    want = -0.5 * sum(p * np.linalg.solve(h, g) for p, h in zip(share, hessians, strict=True))
    np.testing.assert_allclose(run.shared["model"]["weight"][0], want, atol=1e-10)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_logistic_regression_converges_in_a_few_rounds_with_line_search(engine):
    clients = pairs((60, 60, 60), d=3)
    fed = ft.Federation.from_arrays(clients, clients)
    run = ft.run(ft.GIANT(ridge=0.1, line_search=True), fed, "linear", rounds=6, engine=engine, batch_size=None, **OPTIONS)
    w = run.shared["model"]
    rows = [torch.tensor(np.concatenate(part)) for part in zip(*clients, strict=True)]
    p = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
    loss = torch.nn.functional.cross_entropy(rows[0] @ p["weight"].T + p["bias"], rows[1])
    objective = loss + 0.05 * sum(leaf.square().sum() for leaf in p.values())
    slopes = torch.autograd.grad(objective, list(p.values()))
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-4


def test_a_ridge_and_a_line_search_keep_clients_with_fewer_rows_than_parameters_from_exploding():
    clients = pairs([5] * 6, d=6)
    run = ft.run(ft.GIANT(line_search=True), ft.Federation.from_arrays(clients, clients), "linear", rounds=5, **OPTIONS)
    assert run.summary["loss_personal"] < np.log(2)  # that of no model at all; without the ridge it is 1e25


def test_the_longest_step_that_is_low_enough_is_taken():
    values = torch.tensor([1.0, 1.5, 0.99, 0.9, *[0.95] * 7])
    assert longest(values, torch.tensor(0.2)) == 0.25
    assert longest(values, torch.tensor(1.0)) == 4.0**-2  # 1/4 would have to be at most 0.975
    assert longest(torch.full((11,), 2.0), torch.tensor(1.0)) == pytest.approx(1.0 * 4.0**-9)


def test_it_takes_no_local_steps_and_is_not_private():
    with pytest.raises(InvalidArgument, match="takes no local steps"):
        ft.GIANT(steps=3)
    clients = pairs((8, 8))
    with pytest.raises(InvalidArgument, match="Newton directions"):
        ft.run(ft.GIANT(opt=ft.Private()), ft.Federation.from_arrays(clients, clients), "linear", rounds=1)
