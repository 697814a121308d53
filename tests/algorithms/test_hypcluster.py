"""HypCluster finds the groups that are there, from a start at zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.algorithms.hypcluster import groups


def chosen(run: ft.Run) -> list[int]:
    return [int(own["chosen"].argmax()) for own in run.personal]


def partition(labels) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(np.asarray(labels) == label).tolist()) for label in set(labels)}


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("seed", [0, 3])
def test_three_groups_end_in_three_clusters(task, seed):
    """With seed 3 and starts drawn about zero, two of the three shared a model."""
    fed = ft.Federation.load("clusters", rows=60, task=task, seed=seed)
    run = ft.run(ft.HypCluster(k=3, lr=0.3, steps=10), fed, rounds=5)
    assert partition(chosen(run)) == partition([i % 3 for i in range(12)])


def test_groups_that_have_most_in_common_do_not_collapse_to_one_model():
    """The zero start of one of the k models fits everybody better than noise, and everybody would follow it."""
    draw = np.random.default_rng(0)
    common, clients = 3 * np.ones(6), []
    for i in range(9):
        x = draw.normal(size=(50, 6))
        clients.append((x, x @ (common + 2 * np.eye(6)[i % 3]) + 0.1 * draw.normal(size=50)))
    fed = ft.Federation.from_arrays(clients, clients)
    options = {"k": 3, "lr": 0.1, "steps": 5}
    run = ft.run(ft.HypCluster(**options), fed, rounds=30, bias=False, dtype="float64")
    assert partition(chosen(run)) == partition([i % 3 for i in range(9)])
    assert run.summary["mse_personal"] < 0.02
    drawn = ft.run(ft.HypCluster(**options, spread=0.1), fed, rounds=30, bias=False, dtype="float64")
    assert len(set(chosen(drawn))) < 3


def shares(points, k, weights=None):
    flat = torch.tensor(points, dtype=torch.float64)
    weights = torch.full((len(flat),), 1 / len(flat)) if weights is None else torch.tensor(weights)
    rnd = ft.Round(
        number=0,
        rounds=1,
        clients=len(flat),
        cohort=len(flat),
        mass=1.0,
        weights=weights,
        ranks=torch.arange(len(flat)),
        seed=0,
        exchange=0,
    )
    return groups({"w": flat}, rnd, k).numpy()


def test_changes_are_put_together_by_distance_and_weighed():
    share = shares([[0.0, 0], [0.1, 0], [9, 9], [9, 9.2], [-7, 0]], 3, [0.1, 0.3, 0.2, 0.2, 0.2])
    np.testing.assert_allclose(share.sum(1), 1)
    assert {tuple(np.round(row, 6)) for row in share} == {(0.25, 0.75, 0, 0, 0), (0, 0, 0.5, 0.5, 0), (0, 0, 0, 0, 1)}


def test_with_fewer_changes_than_clusters_some_start_alike():
    share = shares([[0.0], [1.0]], 4)
    np.testing.assert_array_equal(share.sum(1), 1)
    assert {tuple(row) for row in share} == {(1, 0), (0, 1)}


def test_hidden_clients_need_starts_that_are_drawn():
    fed = ft.Federation.load("clusters", rows=20)
    options = {"rounds": 2, "user_clip": 1.0, "user_noise": 5.0}
    with pytest.raises(ft.errors.FedtailorError, match="more of the uploads than their mean"):
        ft.run(ft.HypCluster(k=3), fed, **options)
    assert ft.run(ft.HypCluster(k=3, spread=0.1), fed, **options).summary["user_epsilon"] > 0
