"""CLUP on images: the claims read degrees of sharing, rounds and classes as they are meant, and PARTIAL's digits are averaged."""

from __future__ import annotations

import numpy as np
import pytest

from fedtailor.data.pool import PooledData
from fedtailor.papers import label_skew, split_problem

LOCAL, SMALL, LARGE, SHARED = "LocalTrain", "FedCLUP, lam = 0.1", "FedCLUP, lam = 1", "GlobalTrain"


def table(whole, own, losses):
    """Rows of two rounds and two numbers of classes; the first round's accuracy is the last's in reverse order of methods."""
    out = []
    for classes in (2, 10):
        for k, method in enumerate((LOCAL, SMALL, LARGE, SHARED)):
            first, last = own[classes][::-1][k], own[classes][k]
            for number, accuracy in ((1, first), (2, last)):
                value = whole[classes][k] if number == 2 else None
                row = {"classes": classes, "method": method, "round": number, "own": accuracy, "whole": value}
                out.append({**row, "loss": losses[k] / number})
    return out


def test_the_claims_by_hand():
    rows = table(
        {2: [0.1, 0.3, 0.4, 0.5], 10: [0.6, 0.7, 0.8, 0.9]}, {2: [0.9, 0.8, 0.7, 0.6], 10: [0.5, 0.6, 0.7, 0.8]}, [1, 2, 4, 8]
    )
    assert label_skew.smallest_step(rows) == pytest.approx(0.1)
    assert label_skew.over_lam(rows) == pytest.approx(0.1)
    assert label_skew.local_behind(rows) == pytest.approx(0.1)
    assert label_skew.homogeneity(rows) == pytest.approx(0.4)
    assert label_skew.moves(rows) == 3
    assert label_skew.first_round(rows) == 2.0
    assert label_skew.settling(rows) == 1  # the smaller lam begins above its last accuracy, the larger one below
    assert label_skew.crossing(rows) == 2


def pool(count=400, side=28):
    draw = np.random.default_rng(0)
    return PooledData("digits", draw.integers(0, 256, (count, 1, side, side), dtype=np.uint8), np.arange(count) % 10)


def test_a_federation_of_labels_is_measured_in_every_round(monkeypatch):
    monkeypatch.setitem(label_skew.POOLS, "mnist", pool)
    settings = {"set": "mnist", "model": "linear", "clients": 2, "rows": 60, "classes": [10], "lams": [0.5], "pfedme": [0.5]}
    rows = label_skew.measure({**settings, "lr": 0.05, "epochs": 1, "batch_size": 16, "rounds": 2}, 0)
    assert [(row["method"], row["round"]) for row in rows[:2]] == [("LocalTrain", 1), ("LocalTrain", 2)]
    assert len({row["method"] for row in rows}) == 4
    assert all(np.isfinite([row["loss"], row["own"]]).all() for row in rows)
    assert [row["whole"] is not None for row in rows[:2]] == [False, True]


def test_digits_are_averaged_over_squares(monkeypatch):
    digits = pool()
    monkeypatch.setattr(split_problem.images, "mnist", lambda: digits)
    fed = split_problem.digits({"clients": 2, "rows": 100, "side": 7, "partition": "iid"}, 0)
    assert fed.train.x.shape[1:] == (7, 7)
    means = digits.x.reshape(-1, 7, 4, 7, 4).mean((2, 4)) / 255
    seen = fed.train.client(0)[0][0].numpy()
    assert np.abs(means - seen).max((1, 2)).min() < 1e-6
