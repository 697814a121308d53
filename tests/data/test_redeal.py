"""Another split of the same rows: every row is still there once, with its client, and class shares are kept."""

from __future__ import annotations

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.data.redeal import overlap, redealt


@pytest.fixture(scope="module")
def fed():
    draw = np.random.default_rng(0)

    def part(rows):
        ys = [np.repeat([0, 1, 2], [rows, rows // 2, rows // 4]) for _ in range(4)]
        return [(draw.normal(size=(len(y), 2)), y) for y in ys]

    return ft.Federation.from_arrays(part(40), part(16), part(8))


def all_rows(fed, i):
    rows = [np.column_stack([x, y]) for x, y in (s.client(i) for s in (fed.train, fed.test, fed.val))]
    return np.sort(np.concatenate(rows), axis=0), rows


def test_every_client_keeps_its_rows_and_as_many_of_each_part(fed):
    other = redealt(fed, 3)
    for i in range(len(fed)):
        (before, was), (after, now) = all_rows(fed, i), all_rows(other, i)
        np.testing.assert_array_equal(before, after)
        assert [len(part) for part in was] == [len(part) for part in now]


def test_classes_keep_their_shares_in_every_part(fed):
    other = redealt(fed, 1)
    for split, was in ((other.train, fed.train), (other.test, fed.test), (other.val, fed.val)):
        for i in range(len(fed)):
            counts, before = (np.bincount(s.client(i)[1], minlength=3) for s in (split, was))
            assert np.abs(counts - before).max() <= 2


def test_splits_differ_and_the_first_is_the_one_it_came_with(fed):
    assert redealt(fed, 0) is fed
    one, two, again = redealt(fed, 1), redealt(fed, 2), redealt(fed, 1)
    assert not one.test.x.equal(two.test.x)
    assert not one.test.x.equal(fed.test.x)
    assert one.test.x.equal(again.test.x)


def test_a_clients_split_depends_on_nobody_else(fed):
    alone = redealt(fed.take([2]), 1)
    assert alone.test.client(0)[0].equal(redealt(fed, 1).test.client(2)[0])


def test_over_many_splits_every_row_is_tested_about_as_often(fed):
    """With 28 of 126 rows tested, 400 splits test a row 88.9 times on average, with a deviation of at most 8.4."""
    alone = fed.take([0])
    seen = {}
    for number in range(1, 401):
        for value in redealt(alone, number).test.x[:, 0].tolist():
            seen[value] = seen.get(value, 0) + 1
    share = len(alone.test.y) / sum(len(s.y) for s in (alone.train, alone.test, alone.val))
    counts = np.array(list(seen.values()))
    assert len(counts) == sum(len(s.y) for s in (alone.train, alone.test, alone.val))
    assert np.abs(counts - 400 * share).max() < 5 * np.sqrt(400 * share * (1 - share))


def test_overlap_is_test_over_training_rows(fed):
    assert overlap(fed) == len(fed.test.y) / len(fed.train.y)
