"""Groups of clients far from each other: found where they are, and only there."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

import fedtailor as ft
from fedtailor.data.split import Split
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.theory.clusters import find
from fedtailor.theory.fits import Summary
from fedtailor.theory.heterogeneity import linear_task, summaries

HERE = Path(__file__).resolve().parents[2]


def exact(points: np.ndarray, noise: float = 0.0) -> list[Summary]:
    """Clients whose fits are these points, each coordinate with this variance."""
    d = points.shape[1]
    fixed = {"n": 100, "load": d, "inputs": d, "rank": d}
    return [
        Summary(w, noise * np.eye(d), variance=2 * d * noise**2, square=d * noise**2, name=f"c{i}", **fixed)
        for i, w in enumerate(points)
    ]


def simplex(groups: int, d: int, distance: float) -> np.ndarray:
    return np.eye(d)[:groups] * distance / math.sqrt(2)


# -- by hand ----------------------------------------------------------------------------------------------------------------
def test_two_groups_on_a_line_by_hand():
    at = np.array([0.0, 1, 2, 3, 4, 100, 101, 102, 103, 104])[:, None]
    clusters = find(exact(at, noise=0.25))
    assert clusters.k == 2
    assert clusters.labels == (0,) * 5 + (1,) * 5
    # squares 10 in each group, of which noise makes (1 - 1/5) 5/4 in each; centers at -50 and 50, noise of each 0.25/5
    assert clusters.within_r2 == pytest.approx((20 - 2 * 0.8 * 1.25) / 10)
    assert clusters.between_r2 == pytest.approx(50**2 - 0.25 * (0.2 - 0.1))
    assert clusters.stability == pytest.approx(1.0)
    assert clusters.names == tuple(f"c{i}" for i in range(10))
    assert json.loads(json.dumps(clusters.json(), allow_nan=False))["labels"]["c9"] == 1


def test_the_largest_group_comes_first_and_the_order_of_clients_only_permutes():
    draw = np.random.default_rng(0)
    which = np.array([1] * 4 + [0] * 8 + [2] * 6)
    points = simplex(3, 6, 30.0)[which] + draw.normal(size=(18, 6))
    clusters = find(exact(points, 0.5))
    assert adjusted_rand_score(clusters.labels, which) == 1
    assert np.bincount(clusters.labels).tolist() == [8, 6, 4]
    turn = draw.permutation(18)
    assert find(exact(points[turn], 0.5)).labels == tuple(clusters.labels[i] for i in turn)


def test_two_far_clients_are_no_group():
    points = np.random.default_rng(1).normal(size=(20, 5))
    points[:2] += 50
    assert find(exact(points, 0.5)).k == 1


def test_five_clients_are_too_few():
    clusters = find(exact(np.array([[0.0], [1.0], [50.0], [51.0], [52.0]]), 0.1))
    assert (clusters.k, clusters.labels) == (1, (0,) * 5)
    assert "too few" in clusters.text


def test_clients_that_are_all_the_same_form_one_group():
    clusters = find(exact(np.ones((8, 3))))
    assert (clusters.k, clusters.within_r2, clusters.between_r2) == (1, 0.0, 0.0)


def test_groups_without_any_scatter_are_found():
    assert find(exact(simplex(3, 4, 5.0)[np.arange(9) % 3])).k == 3


def test_at_most_so_many_groups_as_asked():
    draw = np.random.default_rng(2)
    points = simplex(4, 6, 30.0)[np.arange(24) % 4] + draw.normal(size=(24, 6))
    assert find(exact(points, 0.5)).k == 4
    assert find(exact(points, 0.5), most=1).k == 1


def test_a_direction_that_is_hardly_known_does_not_hide_the_groups():
    draw = np.random.default_rng(3)
    scale = np.array([1.0, 1.0, 1.0, 1.0, 200.0])
    which = np.arange(20) % 2
    points = simplex(2, 5, 15.0)[which] + draw.normal(size=(20, 5)) * scale
    sent = [
        Summary(w, np.diag(scale**2), 100, 5, 5, 5, 2 * float((scale**4).sum()), float((scale**4).sum()), name=str(i))
        for i, w in enumerate(points)
    ]
    assert find(exact(points, 1.0)).k == 1  # without the covariances the groups are lost
    assert adjusted_rand_score(find(sent).labels, which) == 1


SIZES = [(15, 5), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((30, 10), (20, 40)))]  # clients, coordinates


# -- how often --------------------------------------------------------------------------------------------------------------
def share(draw: np.random.Generator, m: int, d: int, groups: int, make: str, cases: int) -> float:
    """How often the number of groups is right, where centers are 3 times the scatter in a group apart, half of it noise."""
    right = 0
    for _ in range(cases):
        if make == "alike":
            true, noise = np.zeros((m, d)), 1.0
        elif make == "sphere":
            true, noise = draw.normal(size=(m, d)), 0.5
            true *= math.sqrt(d / 2) / np.linalg.norm(true, axis=1, keepdims=True)
        elif make == "long":
            true, noise = draw.normal(size=(m, d)) * np.linspace(3, 0.3, d), 0.5
        else:
            true, noise = math.sqrt(0.5) * draw.normal(size=(m, d)), 0.5
        centers = simplex(groups, d, 3 * math.sqrt(d) if groups > 1 else 0.0)
        points = centers[np.arange(m) % groups] + true + math.sqrt(noise) * draw.normal(size=(m, d))
        right += find(exact(points, noise)).k == groups
    return right / cases


@pytest.mark.parametrize("make", ["alike", "normal", "sphere", "long"])
@pytest.mark.parametrize(("m", "d"), SIZES)
def test_a_federation_without_groups_has_none(make, m, d):
    assert share(np.random.default_rng(4), m, d, 1, make, 20) >= 0.9


@pytest.mark.parametrize("groups", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("m", "d"), SIZES)
def test_groups_three_scatters_apart_are_found(groups, m, d):
    assert share(np.random.default_rng(5), m, d, groups, "normal", 10) >= 0.9


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_generated_groups_are_found_from_the_clients_fits(task):
    options = {"R": 0.1, "distance": 4.0, "noise": 0.5, "rows": 40 if task == "regression" else 400, "d": 5, "test_rows": 1}
    fed = ft.Federation.load("clusters", clients=15, groups=3, task=task, **options)
    clusters = find(summaries(linear_task(fed, bias=False), fed))
    assert clusters.k == 3
    assert adjusted_rand_score(clusters.labels, np.arange(15) % 3) == 1
    # centers of three groups, all `distance` apart, lie at distance/sqrt(3) from their mean; half of that square as a softmax
    assert clusters.between_r2 == pytest.approx(16 / 3 / (1 if task == "regression" else 2), rel=0.25)
    assert clusters.within_r2 < 0.15 * clusters.between_r2


def test_a_client_with_too_little_data_joins_the_nearest_group():
    fed = ft.Federation.load("clusters", clients=13, groups=2, R=0.1, distance=6.0, d=4, rows=40, test_rows=1)
    pairs = [fed.train.client(i) for i in range(13)]
    pairs[12] = (pairs[12][0][:5], pairs[12][1][:5])
    poor = ft.Federation.from_arrays(pairs, pairs)
    clusters = find(summaries(linear_task(poor, bias=False), poor))
    assert clusters.left_out == ("12",)
    assert clusters.k == 2
    assert clusters.labels[12] == clusters.labels[0]


# -- refusals ---------------------------------------------------------------------------------------------------------------
def test_what_cannot_be_grouped_is_refused():
    with pytest.raises(InvalidArgument, match="whole number of groups"):
        find(exact(np.ones((4, 2))), most=0)
    with pytest.raises(InvalidData, match="at least two"):
        find(exact(np.ones((1, 2))))


# -- writers ----------------------------------------------------------------------------------------------------------------
def writers(count: int) -> ft.Federation:
    """The writers of MNIST with the most digits, on 16 principal components of their pooled training rows."""
    place = Path(os.environ.get("FEDTAILOR_DATA") or HERE.parent / "shared" / "data")
    if not (place / "qmnist_writers").is_dir() or not (place / "mnist").is_dir():
        pytest.skip("needs mnist and qmnist_writers under $FEDTAILOR_DATA")
    whole = ft.Federation.load("mnist", partition="natural", data_dir=str(place))
    fed = whole.take(np.sort(np.argsort(-whole.train.sizes, kind="stable")[:count]))
    rows = fed.train.x.flatten(1).double()
    turn = torch.linalg.eigh(torch.cov(rows.T))[1][:, -16:]

    def seen(split: Split) -> Split:
        x = (split.x.flatten(1).double() - rows.mean(0)) @ turn
        return Split(x, split.y, split.offsets)

    return replace(fed, train=seen(fed.train), test=seen(fed.test), val=None)


@pytest.mark.slow
def test_writers_of_mnist_give_a_finite_answer_that_says_it_is_rough():
    """Ten digits on 17 inputs are 153 parameters for some 90 rows: nothing to trust. That the two populations are found is not
    claimed."""
    fed = writers(20)
    sent = summaries(linear_task(fed), fed, draws=5)
    clusters = find(sent)
    assert clusters.k == len(set(clusters.labels))
    assert math.isfinite(clusters.within_r2)
    assert len(clusters.labels) == 20
