"""How a table is read: the choices, and which of them cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from fedtailor.data.words import check_choice
from fedtailor.errors import InvalidArgument


@dataclass(frozen=True)
class Options:
    """How a table is read; every field but these defaults is part of a federation's recipe."""

    features: Sequence[str] | None = None
    drop: Sequence[str] = ()
    split: str | None = None
    task: str | None = None
    standardize: str = "pooled"
    missing: str = "fill"
    min_samples: int | None = None
    test_share: float = 0.25
    val_share: float = 0.15
    seed: int = 0
    name: str | None = None
    standardize_label: bool = False
    image_size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for option in ("features", "drop"):
            value = getattr(self, option)
            if isinstance(value, str):
                raise InvalidArgument(f"{option}={value!r} is one string; give a list of column names, for instance [{value!r}]")
        if self.task is not None:
            check_choice("task", self.task, ("classification", "regression"))
        check_choice("standardize", self.standardize, ("pooled", "client", "none"))
        check_choice("missing", self.missing, ("fill", "drop", "refuse"))
        if self.min_samples is not None and self.min_samples < 1:
            raise InvalidArgument(f"min_samples={self.min_samples} must be at least 1")
        if not 0 < self.test_share < 1 or not 0 <= self.val_share < 1 or self.test_share + self.val_share >= 1:
            raise InvalidArgument(
                f"test_share={self.test_share} and val_share={self.val_share} leave no rows to train on or to test on; "
                "use for instance 0.25 and 0.15"
            )

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults, as plain values."""
        mine = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in mine.items()}

    @property
    def shares(self) -> tuple[float, ...]:
        return (1 - self.test_share - self.val_share, self.test_share) + ((self.val_share,) if self.val_share else ())
