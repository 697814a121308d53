"""The family with two kinds of rows: the laws, the kinds kept beside the rows, how visible they are, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import norm, rankdata

import fedtailor as ft
from fedtailor.errors import InvalidArgument


def made(**options):
    return ft.Federation.load("instances", **{"clients": 4, "rows": 60, "test_rows": 4000, "noise": 0.0, "seed": 3, **options})


def direction(x, y):
    """Of the law: for normal x the mean of x times the sign is along w (Stein); with its error of about sqrt(d/n)."""
    mean = (x * (2 * y - 1)[:, None]).mean(0) - x.mean(0) * (2 * y - 1).mean()
    return mean / np.linalg.norm(mean)


def parts(fed, client):
    x, y = (part.double().numpy() for part in fed.test.client(client))
    kind = fed.test.kinds[fed.test.offsets[client] : fed.test.offsets[client + 1]].numpy()
    return x, y, kind


def test_common_rows_follow_one_law_in_all_clients_and_own_rows_one_each():
    fed = made(visible=0.0, d=6)
    ours, theirs = [], []
    for i in range(4):
        x, y, kind = parts(fed, i)
        ours.append(direction(x[kind], y[kind]))
        theirs.append(direction(x[~kind], y[~kind]))
        for w, rows in ((ours[-1], kind), (theirs[-1], ~kind)):
            assert ((x[rows] @ w > 0) == (y[rows] > 0)).mean() > 0.95  # the law is linear through zero
    assert min(a @ b for a in ours for b in ours) > 0.98
    assert max(a @ b for i, a in enumerate(theirs) for b in [*theirs[:i], ours[0]]) < 0.9


@pytest.mark.parametrize("visible", [0.0, 1.0, 3.0])
def test_the_kind_shows_along_one_direction_as_much_as_asked_and_laws_do_not_look_there(visible):
    fed = made(visible=visible, share=0.4)
    x, y = fed.test.x.double().numpy(), fed.test.y.numpy()
    kind = fed.test.kinds.numpy()
    assert kind.mean() == pytest.approx(0.4, abs=0.02)
    gap = x[kind].mean(0) - x[~kind].mean(0)
    assert np.linalg.norm(gap) == pytest.approx(visible, abs=0.1)
    if visible:
        score = x @ gap
        ranks = rankdata(score)
        n, m = kind.sum(), (~kind).sum()
        area = (ranks[kind].sum() - n * (n + 1) / 2) / (n * m)
        assert area == pytest.approx(norm.cdf(visible / np.sqrt(2)), abs=0.015)
        inside = score[kind] - score[kind].mean()
        assert abs(np.corrcoef(inside, y[kind])[0, 1]) < 0.05


def test_the_ends_of_the_share_have_one_kind_and_noise_makes_labels_random():
    assert made(share=1.0, test_rows=50).test.kinds.all()
    assert not made(share=0.0, test_rows=50).test.kinds.any()
    fed = made(share=1.0, noise=1.0, d=6)
    x, y = fed.test.x.double().numpy(), fed.test.y.numpy()
    right = ((x @ direction(x, y) > 0) == (y > 0)).mean()
    assert right == pytest.approx(0.75, abs=0.02)  # signal and noise of one size: 1/2 + atan(1)/pi


def test_kinds_stay_with_their_rows():
    fed = made(test_rows=30, val_rows=7)
    assert (len(fed.train.kinds), len(fed.test.kinds), len(fed.val.kinds)) == (240, 120, 28)
    two = fed.to(torch.float64).take([2, 0])
    assert torch.equal(two.test.kinds, torch.cat([fed.test.kinds[60:90], fed.test.kinds[:30]]))
    assert torch.equal(fed.as_task("regression").val.kinds, fed.val.kinds)
    assert made(val_rows=0).val is None
    assert ft.Federation.load("clusters").test.kinds is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"d": 1}, "d of at least 2"),
        ({"share": 1.2}, "share must be at least 0 and at most 1"),
        ({"visible": -1.0}, "visible must be at least 0, not -1.0"),
        ({"noise": -0.1}, "noise must be at least 0"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"val_rows": -1}, "val_rows must be at least 0"),
    ],
)
def test_instances_that_cannot_be(options, words):
    with pytest.raises(InvalidArgument, match=words):
        made(**options)
