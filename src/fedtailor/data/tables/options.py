"""Options for reading a table, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedtailor.data.missing import MARKS
from fedtailor.data.words import check_choice
from fedtailor.errors import InvalidArgument
from fedtailor.task.kinds import CLASSIFICATION, REGRESSION


@dataclass(frozen=True)
class TableOptions:
    """The options by which a table is read; what differs from these defaults is part of a federation's recipe."""

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
    na: Sequence[str] = ()
    keep_na: bool = False
    merge_clients: bool = False
    merge_labels: bool = False
    columns: str | None = None
    row_weights: str | None = None

    def __post_init__(self) -> None:
        for option in ("features", "drop", "na"):
            value = getattr(self, option)
            if isinstance(value, str):
                content = "marks" if option == "na" else "column names"
                raise InvalidArgument(f"{option}={value!r} is one string; give a list of {content}, for instance [{value!r}]")
        if self.task is not None:
            check_choice("task", self.task, (CLASSIFICATION, REGRESSION))
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
        """Return the options that differ from their defaults, as plain values."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if self.columns is not None:
            changed["columns"] = str(Path(self.columns).expanduser().absolute())
        return {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in changed.items()}

    @property
    def marks(self) -> tuple[str, ...]:
        """The words that mean missing in a feature column; in the others only ``na`` does."""
        return tuple(self.na) if self.keep_na else (*MARKS, *(mark for mark in self.na if mark not in MARKS))

    @property
    def shares(self) -> tuple[float, ...]:
        return (1 - self.test_share - self.val_share, self.test_share) + ((self.val_share,) if self.val_share else ())


@dataclass(frozen=True)
class FolderOptions(TableOptions):
    """The options by which a folder is read: its tables as any table, its images resized to ``image_size``."""

    image_size: int | tuple[int, int] | None = None
