"""Another split of the same rows: every row is still there once, with its client, and class shares are kept."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedtailor as ft
from fedtailor.data.redeal import fits_anew, folded, overlap, redealt


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


def test_in_folds_every_row_tests_once_and_classes_are_spread(fed):
    folds = [folded(fed, number, 5) for number in range(5)]
    for i in range(len(fed)):
        everything, _ = all_rows(fed, i)
        tested = np.concatenate([np.column_stack(fold.test.client(i)) for fold in folds])
        np.testing.assert_array_equal(np.sort(tested, axis=0), everything)
        counts = np.array([np.bincount(fold.test.client(i)[1], minlength=3) for fold in folds])
        assert (np.ptp(counts, axis=0) <= 2).all()
        for fold in folds:
            np.testing.assert_array_equal(all_rows(fold, i)[0], everything)
            assert abs(len(fold.val.client(i)[1]) / len(fold.train.client(i)[1]) - 0.2) < 0.02  # 14 of 84 rows, as before


def test_more_folds_than_a_client_has_rows_are_refused_by_its_name(fed):
    with pytest.raises(ft.errors.InvalidArgument, match="fewer folds"):
        folded(fed, 0, 1000)


def table(rows=90):
    draw = np.random.default_rng(1)
    age = draw.normal(50, 10, rows)
    age[::7] = np.nan
    frame = {"site": np.tile(["a", "b", "c"], rows // 3), "age": age, "y": draw.choice(["ill", "well"], rows)}
    return pd.DataFrame({**frame, "count": draw.integers(0, 3, rows) + np.eye(1, rows)[0]})


@pytest.mark.parametrize("deal", [lambda fed: redealt(fed, 2), lambda fed: folded(fed, 1, 3)])
def test_columns_of_a_table_are_scaled_and_filled_by_each_splits_own_training_rows(deal):
    frame = table()
    fed = ft.Federation.from_table(frame, client="site", label="y", drop=["count"])
    other = deal(fed)
    age = frame["age"].to_numpy()
    known = age[other.train.rows]
    fill = np.nanmedian(known)
    filled = np.where(np.isnan(known), fill, known)
    for split in (other.train, other.test, other.val):
        values = np.where(np.isnan(age[split.rows]), fill, age[split.rows])
        np.testing.assert_allclose(split.x[:, 0], (values - filled.mean()) / filled.std(), atol=1e-5)
        np.testing.assert_array_equal(np.array(fed.classes)[split.y], frame["y"].to_numpy()[split.rows])
    assert other.schema.columns[0].fill == fill
    assert not np.allclose(fed.schema.columns[0].mean, other.schema.columns[0].mean)
    held_out = other.fitted_to([0, 1])  # newcomers stay out of the scaling in every split
    rows = other.train.rows[other.train.offsets[0] : other.train.offsets[2]]
    assert held_out.schema.columns[0].fill == np.nanmedian(age[rows])


def test_rows_that_are_not_as_read_keep_their_features(fed):
    read = ft.Federation.from_table(table(), client="site", label="y")
    assert fits_anew(read)
    part = read.take([0, 1])
    assert not fits_anew(part)
    both = np.concatenate([part.train.x, part.test.x, part.val.x])
    again = redealt(part, 1)
    np.testing.assert_array_equal(np.sort(both, 0), np.sort(np.concatenate([again.train.x, again.test.x, again.val.x]), 0))
    with pytest.warns(UserWarning, match="as for the first split"):
        ft.compare([ft.Local()], part, splits=2, rounds=1, yardsticks=("none",))


def test_weights_of_a_column_go_with_their_rows_into_every_split():
    frame = table()
    fed = ft.Federation.from_table(frame, client="site", label="y", row_weights="count")
    for split in (fed, redealt(fed, 1), folded(fed, 0, 4)):
        np.testing.assert_array_equal(split.train.weights, frame["count"].to_numpy()[split.train.rows])
        assert "count" not in split.schema.names()
