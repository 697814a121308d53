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
        known = {key for r in self.values() for key in r.summary}
        for column in columns:
            if column not in known:
                raise InvalidArgument(f"no column {column!r} in the summaries; the columns are {', '.join(sorted(known))}")
        return [
            {"method": label, **{k: v for k, v in r.summary.items() if not columns or k in columns}} for label, r in self.items()
        ]


def compare(
    algorithms: Sequence[Algorithm] | Mapping[str, Algorithm], federation: Federation, model: Any = "linear", **options: Any
) -> Comparison:
    """Run every algorithm with the same options (those of ``run``); a mapping gives the labels."""
    if isinstance(algorithms, Algorithm):
        algorithms = [algorithms]
    if not algorithms:
        raise InvalidArgument("there is nothing to compare; give at least one algorithm")
    named = dict(algorithms) if isinstance(algorithms, Mapping) else _labelled(algorithms)
    return Comparison({label: run(algorithm, federation, model, **options) for label, algorithm in named.items()})


def _labelled(algorithms: Sequence[Algorithm]) -> dict[str, Algorithm]:
    out: dict[str, Algorithm] = {}
    for algorithm in algorithms:
        name = type(algorithm).__name__
        taken = sum(label.split(" ")[0] == name for label in out)
        out[name if not taken else f"{name} {taken + 1}"] = algorithm
    return out
