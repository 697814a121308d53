"""Every method, step by step, against an independent transcription of its paper: to 1e-9 unless said.

A case is played on both engines in its last setting, and on the loop engine in the others; ``make check-all`` plays it on both.
"""

from __future__ import annotations

import pytest

from fedtailor.algorithms import METHODS
from tests.oracles.harness import ENGINES, oracle, stem, trials

FOUND = {method: module for method in METHODS if (module := oracle(method)) is not None}


def wanted(methods):
    """The files that are missing, or that compare nothing."""
    empty = [
        m for m in methods if (file := oracle(m)) is None or not (trials(file) or any(n.startswith("test_") for n in vars(file)))
    ]
    return [f"tests/oracles/{stem(method)}.py" for method in empty]


def test_every_method_has_an_oracle():
    assert not wanted(METHODS), f"write {', '.join(wanted(METHODS))}: a transcription of the paper and its CASES (see harness.py)"


def test_a_missing_oracle_is_named():
    stranger = type("Stranger", (), {"__module__": "fedtailor.algorithms.stranger"})
    assert wanted([METHODS[0], stranger]) == ["tests/oracles/stranger.py"]


@pytest.mark.parametrize("method", FOUND, ids=lambda method: method.__name__)
def test_an_oracles_cases_are_of_its_method(method):
    assert {type(trial.case.method) for trial in trials(FOUND[method])} <= {method}


TRIALS = [trial for module in FOUND.values() for trial in trials(module)]


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_method_follows_its_paper_step_by_step(trial):
    trial.check(ENGINES if trial.last else ("loop",))


@pytest.mark.slow  # law 3 and the stored summaries hold every method's engines to each other
@pytest.mark.parametrize("trial", [trial for trial in TRIALS if not trial.last], ids=str)
def test_method_follows_its_paper_in_its_other_settings_on_the_vectorized_engine(trial):
    trial.check(("vectorized",))
