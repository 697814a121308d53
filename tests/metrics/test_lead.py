"""How far the first of a ranking is ahead: by the interval of the verdict, and never "clearly" where clients are too few."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedtailor as ft
from fedtailor.metrics.paired import paired
from fedtailor.metrics.verdict import lead, weighing
from fedtailor.task.kinds import CLASSIFICATION

ACC = CLASSIFICATION.score


@pytest.mark.parametrize("margin", [0.9, 1.1])
def test_a_lead_is_clear_exactly_where_the_t_test_of_the_differences_says_so(margin):
    # differences with mean m and deviation 1, m just below or above the critical value over sqrt(n)
    shape = np.array([1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 0.25, -0.25])
    shape /= shape.std(ddof=1)
    mean = margin * stats.t.ppf(0.975, 7) / np.sqrt(8)
    gains = paired(ACC, mean + shape, np.zeros(8))
    assert (stats.ttest_1samp(mean + shape, 0).pvalue < 0.05) == (margin > 1)
    found = lead("Local", gains, ACC, "try more")
    assert found.outcome == ("clear" if margin > 1 else "open")
    assert found.errors_ahead == pytest.approx(mean * np.sqrt(8))
    assert found.sentence.startswith("It is clearly ahead of Local" if margin > 1 else "It is not clearly ahead of Local")
    assert ("try more" in found.sentence) == (margin < 1)


def test_of_two_clients_nothing_is_clear_however_alike_they_are():
    found = lead("Local", paired(ACC, [0.8, 0.8001], [0.5, 0.5]), ACC)
    assert found.outcome == "too few clients"
    assert found.sentence == (
        "It is ahead of Local by accuracy on average, but 2 clients on one split cannot show more than chance."
    )


def test_a_gain_without_scatter_has_no_number_of_standard_errors():
    found = lead("Local", paired(ACC, np.full(8, 0.75), np.full(8, 0.5)), ACC)
    assert (found.outcome, found.json()["errors_ahead"]) == ("clear", None)
    assert found.sentence == "It is clearly ahead of Local by accuracy."


def test_a_plain_mean_that_is_written_alike_is_not_written_twice():
    rows = np.array([3.0, 40.0, 40.0, 40.0, 40.0, 40.0, 40.0])
    assert weighing(paired(ACC, [0.9, *[0.7] * 6], [0.5] * 7, rows)).endswith("the plain mean is +0.2286")  # 1.6/7
    assert weighing(paired(ACC, [0.7] * 7, [0.5] * 7, rows)) == "; clients with few rows count less"
    assert weighing(paired(ACC, [0.7] * 7, [0.5] * 7, rows[1:].repeat(2)[:7])) == ""


@pytest.fixture(scope="module")
def rare() -> ft.Federation:
    """Two hospitals that can be scored by AUC, and four whose rows are all of one class."""
    draw = np.random.default_rng(2)
    parts = []
    for name, rows, share in (("A", 160, 0.1), ("B", 160, 0.1), ("C", 40, 0), ("D", 40, 0), ("E", 40, 0), ("F", 40, 0)):
        x = draw.normal(size=(rows, 3)).round(3)
        y = (x[:, 0] + 0.3 * draw.normal(size=rows) > np.quantile(x[:, 0], 1 - share)) & (share > 0)
        parts.append(pd.DataFrame({"hospital": name, "a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y.astype(int)}))
    return ft.Federation.from_table(pd.concat(parts), client="hospital", label="y")


def test_an_advice_does_not_contradict_itself_where_few_clients_can_be_scored(rare):
    advice = ft.advise(rare, rounds=4)
    assert advice.verdict.score == "auc"
    assert advice.verdict.outcome == "too few clients"
    assert advice.lead.outcome == "too few clients"
    assert "clearly ahead" not in advice.text
    assert advice.lead.sentence in advice.text
    known = [gain for gain in advice.json()["gains"].values() if gain is not None]
    assert len(known) == 2
    assert "; 4 cannot be scored on the validation rows they have." in advice.text or not advice.collaborate


def test_the_page_says_of_the_lead_what_the_terminal_says(rare):
    from fedtailor.report import advice as pages

    advice = ft.advise(rare, rounds=4)
    assert "too few clients to tell" in pages.page(advice.json())
