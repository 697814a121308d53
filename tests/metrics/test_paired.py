"""Paired comparisons: by hand, against SciPy where weights are equal, and at their limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t, ttest_1samp

from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.metrics.paired import Runs, client_weights, differences, holm, interval, paired
from fedtailor.task.scores import ACCURACY, SQUARED_ERROR


def test_a_small_case_agrees_with_the_arithmetic_done_by_hand():
    comparison = paired(ACCURACY, [0.9, 0.8, 0.5, 0.7], [0.8, 0.8, 0.7, 0.4])
    np.testing.assert_allclose(comparison.differences, [0.1, 0.0, -0.2, 0.3], atol=1e-12)
    assert comparison.clients == 4
    assert comparison.mean == pytest.approx(0.05)
    assert (comparison.better, comparison.worse, comparison.equal) == (0.5, 0.25, 0.25)
    assert comparison.over is None  # four clients, one split


def test_less_error_is_a_gain():
    comparison = paired(SQUARED_ERROR, [1.0, 2.0], [3.0, 2.5])
    np.testing.assert_allclose(comparison.differences, [2.0, 0.5])
    assert comparison.mean == 1.25
    assert comparison.better == 1.0


def test_no_difference_at_all_has_p_one_and_an_interval_of_nothing():
    comparison = paired(ACCURACY, [0.5] * 9, [0.5] * 9)
    assert (comparison.p, comparison.mean, comparison.low, comparison.high, comparison.equal) == (1.0, 0.0, 0.0, 0.0, 1.0)


def test_seeds_are_averaged_within_a_client_before_clients_are_counted():
    ours = [[0.6, 0.5], [0.6, 0.9], [0.9, 0.7]]
    theirs = [[0.5, 0.7], [0.8, 0.8], [0.8, 0.6]]
    comparison = paired(ACCURACY, ours, theirs)
    np.testing.assert_allclose(comparison.differences, [0.0, 0.0], atol=0)  # (0.1 - 0.2 + 0.1) / 3, though not to the last bit
    assert comparison.clients == 2
    assert comparison.equal == 1.0


def test_repeating_a_seed_makes_no_evidence():
    rng = np.random.default_rng(3)
    ours, theirs = rng.random(12), rng.random(12)
    once, often = paired(ACCURACY, ours, theirs), paired(ACCURACY, [ours] * 20, [theirs] * 20)
    assert often.p == pytest.approx(once.p)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_an_unknown_measure_leaves_out_the_seed_or_the_client():
    nan = np.nan
    apart = differences(ACCURACY, [[0.5, nan, 0.4], [0.9, nan, 0.2]], [[0.25, 0.1, 0.4], [nan, 0.1, 0.1]])
    np.testing.assert_allclose(apart, [[0.25, nan, 0.05]])


def test_with_equal_rows_it_is_students_test_of_the_clients():
    draw = np.random.default_rng(0)
    ours, theirs = draw.random(12), draw.random(12)
    comparison, want = paired(ACCURACY, ours, theirs, np.full(12, 30)), ttest_1samp(ours - theirs, 0)
    low, high = want.confidence_interval(0.95)
    assert comparison.p == pytest.approx(want.pvalue)
    assert (comparison.low, comparison.high) == pytest.approx((low, high))
    assert comparison.over == "clients"


def test_a_client_with_one_row_does_not_weigh_like_one_with_hundreds():
    np.testing.assert_allclose(client_weights([1, 100, 100, 400]), np.array([1, 100, 100, 100]) / 301)
    gains = np.array([-1.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])  # the one row of the first client is lost
    comparison = paired(ACCURACY, 0.5 + gains, np.full(8, 0.5), [1, *[200] * 7])
    assert comparison.mean == pytest.approx((-1.0 + 200 * 7 * 0.1) / (1 + 200 * 7))
    assert comparison.low > 0
    assert paired(ACCURACY, 0.5 + gains, np.full(8, 0.5)).low < 0


def test_splits_of_the_same_rows_are_corrected_for_their_overlap():
    """Nadeau and Bengio's corrected resampled t-test, written out: the variance counts 1/K + test/train."""
    draw = np.random.default_rng(1)
    ours, theirs = draw.random((10, 4)), draw.random((10, 4))
    comparison = paired(ACCURACY, ours, theirs, np.full(4, 20), Runs(list(range(10)), overlap=0.5))
    means = (ours - theirs).mean(1)
    error = np.sqrt((1 / 10 + 0.5) * means.var(ddof=1))
    assert comparison.over == "splits"
    assert comparison.splits == 10
    assert comparison.p == pytest.approx(2 * t.sf(abs(means.mean()) / error, 9))
    assert comparison.high == pytest.approx(means.mean() + t.ppf(0.975, 9) * error)


def test_of_clients_and_splits_the_one_that_leaves_more_room_is_shown():
    steady = np.linspace(-0.5, 0.6, 12)  # clients differ, splits do not
    ours = 0.5 + steady + np.zeros((5, 12)) + 1e-3 * np.arange(5)[:, None]
    comparison = paired(ACCURACY, ours, np.full((5, 12), 0.5), None, Runs(list(range(5)), 0.3))
    assert comparison.over == "clients"
    ours = 0.6 + np.array([0.3, -0.3, 0.2, -0.2, 0.1])[:, None] + np.zeros((5, 12))  # splits differ, clients do not
    assert paired(ACCURACY, ours, np.full((5, 12), 0.5), None, Runs(list(range(5)), 0.3)).over == "splits"


def test_seeds_of_a_split_are_no_splits():
    draw = np.random.default_rng(2)
    once = draw.random((3, 8))
    many = np.repeat(once, 4, 0)
    a = paired(ACCURACY, once, 0 * once, None, Runs([0, 1, 2], 0.4))
    b = paired(ACCURACY, many, 0 * many, None, Runs(list(np.repeat([0, 1, 2], 4)), 0.4))
    assert (a.low, a.high, a.splits) == (pytest.approx(b.low), pytest.approx(b.high), b.splits)


@given(st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=1, max_size=30))
def test_changing_sides_changes_the_sign_and_nothing_else(values):
    ours, theirs = np.array(values), np.zeros(len(values))
    one, other = paired(ACCURACY, ours, theirs), paired(ACCURACY, theirs, ours)
    assert one.p == pytest.approx(other.p)
    assert one.mean == pytest.approx(-other.mean)
    assert (one.better, one.worse, one.equal) == (other.worse, other.better, other.equal)


@given(st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=6, max_size=30))
def test_the_interval_leaves_out_zero_exactly_where_p_is_below_a_twentieth(values):
    comparison = paired(ACCURACY, np.array(values), np.zeros(len(values)))
    if abs(comparison.p - 0.05) > 1e-9:
        assert (comparison.p < 0.05) == (comparison.low > 0 or comparison.high < 0)


def test_the_interval_of_many_clients_is_the_one_of_the_normal_law():
    apart = np.random.default_rng(0).normal(0.2, 1.0, 2000)
    half = 1.96 * apart.std() / np.sqrt(2000)
    low, high = interval(apart)
    assert low == pytest.approx(apart.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(apart.mean() + half, abs=0.1 * half)


def test_the_interval_is_drawn_from_its_seed_and_stays_among_the_clients():
    apart = np.random.default_rng(0).normal(size=11)
    assert interval(apart, seed=4) == interval(apart, seed=4)
    assert interval(apart, seed=4) != interval(apart, seed=5)
    low, high = interval(apart)
    assert apart.min() <= low <= apart.mean() <= high <= apart.max()
    assert interval([0.25]) == (0.25, 0.25)


def test_holm_multiplies_by_the_comparisons_left_and_never_turns_an_order_around():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("refused", "error", "words"),
    [
        (lambda: paired(ACCURACY, [0.1, 0.2], [0.1]), InvalidArgument, "cannot be paired"),
        (lambda: paired(ACCURACY, [[[0.1]]], [[[0.1]]]), InvalidArgument, "cannot be paired"),
        (lambda: paired(ACCURACY, [np.nan], [0.1]), InvalidData, "no client is measured by both"),
        (lambda: paired(ACCURACY, [], []), InvalidData, "no client is measured by both"),
        (lambda: interval([np.nan]), InvalidData, "no difference to draw from"),
        (lambda: holm([0.1, float("nan")]), InvalidArgument, "between 0 and 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(refused, error, words):
    with pytest.raises(error, match=words):
        refused()
