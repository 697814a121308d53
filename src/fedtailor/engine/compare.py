"""``compare``: several methods on the same splits, seeds and start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.engine.run import run
from fedtailor.errors import InvalidArgument
from fedtailor.runs.history import Run


@dataclass(frozen=True, eq=False)
class Comparison(Mapping[str, Run]):
    """Runs by label: the method's name, numbered where a method occurs twice."""

    runs: Mapping[str, Run]

    def __getitem__(self, label: str) -> Run:
        return self.runs[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def table(self, *columns: str) -> list[dict[str, Any]]:
        """A row per method: its label and the summary (or the columns named)."""
        return [
            {"method": label, **{k: v for k, v in r.summary.items() if not columns or k in columns}} for label, r in self.items()
        ]


def compare(algorithms: Sequence[Algorithm], federation: Federation, model: Any = "linear", **options: Any) -> Comparison:
    """Run every algorithm with the same options (those of ``run``)."""
    if not algorithms:
        raise InvalidArgument("there is nothing to compare; give at least one algorithm")
    runs: dict[str, Run] = {}
    for algorithm in algorithms:
        name = type(algorithm).__name__
        taken = sum(label.split(" ")[0] == name for label in runs)
        runs[name if not taken else f"{name} {taken + 1}"] = run(algorithm, federation, model, **options)
    return Comparison(runs)
