"""Schema: how the columns of a table become features, kept so that new rows are read exactly as the training rows were."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schema:
    """Placeholder until the table reader fills it in."""
