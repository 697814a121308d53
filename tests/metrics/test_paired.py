"""Paired comparisons: by hand, by enumeration, against SciPy where it is exact, and at their limits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata, wilcoxon

from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.metrics.paired import differences, holm, interval, p_value, paired


def enumerated(apart):
    """The two-sided p-value by trying every pattern of signs."""
    apart = np.array([d for d in apart if d != 0])
    ranks = rankdata(np.abs(apart))
    seen = ranks[apart > 0].sum()
    sums = [ranks[np.array(signs)].sum() for signs in product([False, True], repeat=len(apart))]
    low, high = np.mean([s <= seen for s in sums]), np.mean([s >= seen for s in sums])
    return min(1.0, 2 * min(low, high))


def test_a_small_case_agrees_with_the_arithmetic_done_by_hand():
    comparison = paired("classification", [0.9, 0.8, 0.5, 0.7], [0.8, 0.8, 0.7, 0.4])
    np.testing.assert_allclose(comparison.differences, [0.1, 0.0, -0.2, 0.3], atol=1e-12)
    assert comparison.clients == 4
    assert comparison.mean == pytest.approx(0.05)
    assert (comparison.better, comparison.worse, comparison.equal) == (0.5, 0.25, 0.25)
    # ranks 1, 2, 3, of which 1 and 3 are gains: of the 8 patterns {1, 3}, {2, 3} and {1, 2, 3} reach their sum of 4
    assert comparison.p == pytest.approx(2 * 3 / 8)


def test_less_error_is_a_gain():
    comparison = paired("regression", [1.0, 2.0], [3.0, 2.5])
    np.testing.assert_allclose(comparison.differences, [2.0, 0.5])
    assert comparison.mean == 1.25
    assert comparison.better == 1.0


def test_no_difference_at_all_has_p_one_and_an_interval_of_nothing():
    comparison = paired("classification", [0.5] * 9, [0.5] * 9)
    assert (comparison.p, comparison.mean, comparison.low, comparison.high, comparison.equal) == (1.0, 0.0, 0.0, 0.0, 1.0)


def test_seeds_are_averaged_within_a_client_before_clients_are_counted():
    ours = [[0.6, 0.5], [0.6, 0.9], [0.9, 0.7]]
    theirs = [[0.5, 0.7], [0.8, 0.8], [0.8, 0.6]]
    comparison = paired("classification", ours, theirs)
    np.testing.assert_allclose(comparison.differences, [0.0, 0.0], atol=0)  # (0.1 - 0.2 + 0.1) / 3, though not to the last bit
    assert comparison.clients == 2
    assert comparison.equal == 1.0


def test_repeating_a_seed_makes_no_evidence():
    rng = np.random.default_rng(3)
    ours, theirs = rng.random(12), rng.random(12)
    once, often = paired("classification", ours, theirs), paired("classification", [ours] * 20, [theirs] * 20)
    assert often.p == pytest.approx(once.p)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_an_unknown_measure_leaves_out_the_seed_or_the_client():
    nan = np.nan
    apart = differences("classification", [[0.5, nan, 0.4], [0.9, nan, 0.2]], [[0.25, 0.1, 0.4], [nan, 0.1, 0.1]])
    np.testing.assert_allclose(apart, [0.25, nan, 0.05])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 10])
def test_a_unanimous_gain_has_the_smallest_p_value_there_is(n):
    assert p_value(np.arange(1, n + 1)) == pytest.approx(min(1.0, 2 / 2**n))
    assert p_value([0.1] * n) == pytest.approx(min(1.0, 2 / 2**n))  # ties or not


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_p_values_are_the_share_of_sign_patterns_ties_and_zeros_included(apart):
    expected = enumerated(apart) if any(apart) else 1.0
    assert p_value(apart) == pytest.approx(expected, abs=1e-12)


def test_ties_are_seen_through_rounding():
    apart = differences("classification", [0.9, 0.4, 0.3, 0.8], [0.8, 0.3, 0.2, 0.9])  # all 0.1 apart, not to the last bit
    assert p_value(apart) == enumerated([1, 1, 1, -1])


@pytest.mark.parametrize("n", [7, 20, 200])
def test_without_ties_the_count_is_scipys_exact_test(n):
    apart = np.random.default_rng(n).normal(0.3, 1.0, n)
    assert p_value(apart) == pytest.approx(wilcoxon(apart, method="exact").pvalue, rel=1e-9)


def test_the_count_and_the_approximation_meet_where_one_takes_over():
    apart = np.random.default_rng(1).normal(0.15, 1.0, 201)
    assert p_value(apart) == pytest.approx(wilcoxon(apart, method="exact").pvalue, rel=0.05)


@given(st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=1, max_size=30))
def test_changing_sides_changes_the_sign_and_nothing_else(values):
    ours, theirs = np.array(values), np.zeros(len(values))
    one, other = paired("classification", ours, theirs), paired("classification", theirs, ours)
    assert one.p == pytest.approx(other.p)
    assert one.mean == pytest.approx(-other.mean)
    assert (one.better, one.worse, one.equal) == (other.worse, other.better, other.equal)


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
        (lambda: paired("classification", [0.1, 0.2], [0.1]), InvalidArgument, "cannot be paired"),
        (lambda: paired("classification", [[[0.1]]], [[[0.1]]]), InvalidArgument, "cannot be paired"),
        (lambda: paired("classification", [np.nan], [0.1]), InvalidData, "no client is measured by both"),
        (lambda: paired("classification", [], []), InvalidData, "no client is measured by both"),
        (lambda: interval([np.nan]), InvalidData, "no difference to draw from"),
        (lambda: holm([0.1, float("nan")]), InvalidArgument, "between 0 and 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(refused, error, words):
    with pytest.raises(error, match=words):
        refused()
