"""Random inputs, the same ones in every run: all of them in ``make check-all``, the first fifth in ``make test``."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

share = 1.0  # of the examples; set by conftest.py before tests are read


def fuzz(examples: int) -> settings:
    """Return how a test is given so many examples, or this run's share of them."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
    count = max(1, round(share * examples))
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=checks, database=None)
