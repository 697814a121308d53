"""The times of PerAda's rounds: medians of ratios, and a page that says what was held."""

from __future__ import annotations

from benchmarks import perada_speed

TIMES = [(1.0, 0.5, 3.0), (2.0, 1.2, 0.4), (4.0, 3.6, 3.6)]  # ratios 0.5, 0.6, 0.9 and 3, 0.2, 0.9
FOUND = {"net": {str(i): {"ditto": d, "perada": p, "perada_kd": k} for i, (d, p, k) in enumerate(TIMES)}}


def test_a_time_is_held_by_the_median_of_the_ratios():
    assert [(held, how) for _, held, how in perada_speed.claims(FOUND)] == [(True, "0.60"), (False, "0.90")]


def test_the_page_has_a_row_for_each_network_and_says_what_was_not_held():
    page = perada_speed.page(FOUND)
    assert "| net | 3 | 2.00 | 1.20 | 0.60 | 3.00 | 0.90 |" in page
    assert "- net: a round with KD takes at most 0.75 of Ditto's: **not held** (0.90)" in page
