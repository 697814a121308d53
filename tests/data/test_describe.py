"""What a federation looks like before training."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.data import describe as d
from tests.make import federation


def labelled(counts, classes=()):
    """Clients with these numbers of each class in train and in test."""
    from dataclasses import replace

    pairs = [(np.zeros((sum(row), 2)), np.repeat(np.arange(len(row)), row)) for row in counts]
    return replace(ft.Federation.from_arrays(pairs, pairs), classes=tuple(classes))


def test_the_numbers_are_those_counted_by_hand():
    about = d.describe(labelled([[3, 1], [0, 4], [2, 2]]))
    assert about["labels"] == [[6, 2], [0, 8], [4, 4]]
    assert about["rows"] == {"train": 12, "test": 12}
    assert about["sizes"] == {"min": 8, "median": 8.0, "max": 8, "gini": pytest.approx(0.0)}
    # the pooled mix is (10, 14)/24; the clients' first shares are 3/4, 0, 1/2
    assert about["skew"] == pytest.approx((abs(3 / 4 - 10 / 24) + 10 / 24 + abs(1 / 2 - 10 / 24)) / 3)


def test_a_description_is_json():
    for fed in (federation([3, 5]), federation([3, 5], kind="regression", val=True), labelled([[1, 2]])):
        assert json.loads(json.dumps(d.describe(fed), allow_nan=False)) == d.describe(fed)


def test_gini_is_that_of_the_mean_absolute_difference():
    for sizes in ([1, 1, 1], [1, 2, 3, 10], [1, 1, 1, 1000]):
        x = np.array(sizes)
        pairs = np.abs(x[:, None] - x).mean() / (2 * x.mean())
        assert d.gini(x) == pytest.approx(pairs)


def test_by_chance_is_what_random_clients_show():
    draw = np.random.default_rng(0)
    y = draw.permutation(np.repeat([0, 1, 2], [2000, 1000, 600]))
    sizes = np.array([200, 400, 3000])
    variations = []
    for _ in range(300):
        parts = np.split(draw.permutation(y), np.cumsum(sizes)[:-1])
        variations.append(d.variation(np.stack([np.bincount(p, minlength=3) for p in parts])))
    assert d.by_chance(np.array([2000, 1000, 600]) / 3600, sizes) == pytest.approx(np.mean(variations), rel=0.05)


def test_regression_says_how_much_of_the_variance_lies_between_clients():
    x = np.zeros((2, 1))
    pairs = [(x, np.array([0.0, 2.0])), (x, np.array([10.0, 12.0]))]
    about = d.describe(ft.Federation.from_arrays(pairs, pairs))
    assert about["targets"] == [{"mean": 1.0, "std": 1.0}, {"mean": 11.0, "std": 1.0}]
    assert about["skew"] == pytest.approx(25 / 26)  # means 5 from the middle, values 1 from the means
    same = d.describe(ft.Federation.from_arrays([(x, np.array([3.5, 3.5]))], [(x, np.array([3.5, 3.5]))]))
    assert same["skew"] == 0.0


def test_the_bars_have_a_letter_per_class_in_proportion():
    text = d.terminal(d.describe(labelled([[6, 2], [0, 4]], ["cat", "dog"])), width=40).plain
    bars = [line.split()[-1] for line in text.splitlines() if line.strip().startswith(("0 ", "1 "))]
    assert set(bars[0]) == {"A", "B"}
    assert bars[0].count("A") == pytest.approx(3 * bars[0].count("B"), abs=2)
    assert set(bars[1]) == {"B"}
    assert len(bars[0]) == pytest.approx(2 * len(bars[1]), abs=1)
    assert "A cat, B dog" in text
    assert max(map(len, text.splitlines()[-5:])) <= 40


def test_names_of_one_character_are_their_own_letters():
    assert d.marks(["0", "1"]) == ["0", "1"]
    assert d.marks(["0", "10"]) == ["A", "B"]
    assert d.marks([f"class {i}" for i in range(70)])[60:64] == ["8", "9", ".", "."]


@pytest.mark.parametrize(("counts", "length"), [([1, 1, 1], 10), ([5, 0, 3], 7), ([1000, 1], 5), ([2, 3], 1)])
def test_the_cells_of_a_bar_add_up_and_are_within_one_of_the_share(counts, length):
    cells = d.cells(counts, length)
    assert sum(cells) == length
    assert all(abs(cell - count * length / sum(counts)) < 1 for cell, count in zip(cells, counts, strict=True))


def test_many_clients_are_summed_up_in_a_line():
    fed = federation([4 + i % 3 for i in range(45)])
    lines = d.terminal(d.describe(fed)).plain.splitlines()
    assert lines[-1].startswith("... and 15 more clients with 8 to 10 rows")
    assert "not drawn" not in d.html(d.describe(fed))
    assert "5 more clients are not drawn" in d.html(d.describe(federation([4] * 65)))


def test_regression_is_drawn_as_means_and_spreads():
    text = d.terminal(d.describe(federation([5, 6], kind="regression"))).plain
    assert sum("o" in line and "-" in line for line in text.splitlines()[-4:]) >= 2
    assert "of the targets' variance lies between clients" in text


class Page(HTMLParser):
    """The tags of a page, each closed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        while self.open.pop() != tag and self.open:
            pass


def test_the_page_stands_alone_and_draws_a_block_per_class_and_client():
    names = [f"class {i}" for i in range(9)] + ["<b>&"]
    page = d.html(d.describe(labelled([[2] * 10, [1] * 9 + [3]], names)))
    parsed = Page()
    parsed.feed(page)
    tags = [tag for tag, _ in parsed.seen]
    assert "script" not in tags
    assert "b" not in tags
    assert "http" not in page
    assert "src=" not in page
    blocks = [a for tag, a in parsed.seen if tag == "rect" and not a["fill"].startswith("url")]
    assert len(blocks) == 20 + 10  # the bars and the legend
    assert "&lt;b&gt;&amp;" in page
    by_class = sum(a["fill"].startswith("url") for tag, a in parsed.seen if tag == "rect")
    assert by_class == 4 + 2  # the ninth and tenth class are hatched


def test_a_regression_page_has_a_point_per_client():
    page = d.html(d.describe(federation([5, 6, 7], kind="regression")))
    assert page.count("<circle") == 3


def test_many_labels_are_counted_one_by_one():
    x, y = np.zeros((3, 2)), np.array([[1, 0], [1, 1], [0, 0]])
    about = d.describe(ft.Federation.from_arrays([(x, y)], [(x, y)]))
    assert about["kind"] == "multilabel"
    assert about["labels"] == [[4, 2]]
    assert about["skew"] is None
    assert d.terminal(about).plain
    assert "Positive labels" in d.html(about)


@pytest.mark.parametrize(
    ("most", "numbers"),
    [(1, [0, 1]), (3, [0, 1, 2, 3]), (9, [0, 2, 4, 6, 8]), (242, [0, 50, 100, 150, 200]), (600, [0, 200, 400, 600])],
)
def test_an_axis_counts_in_round_numbers(most, numbers):
    assert d.round_numbers(most) == numbers


def test_an_axis_has_few_numbers_of_any_size():
    for most in (*range(1, 2000), 10**6 + 1, 123_456_789):
        assert 2 <= len(d.round_numbers(most)) <= 6
