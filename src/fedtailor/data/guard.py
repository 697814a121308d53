"""A client's data under privacy: its rows are seen by private descents only, and as often as was accounted for.

``Feed`` hands out guarded data where the method's optimiser is private. Whatever else a method does with them (a gradient, a
choice by loss or by validation rows, a store of rows) is refused at the moment it looks, on both engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedtailor.data.secret import Secret, Use
from fedtailor.errors import InvalidArgument

OPEN = ("key", "step", "facts", "expected", "rows", "client")  # these are not computed from rows (``rows`` is their number)
ROWS = ("x", "y", "mask", "val", "weight")


@dataclass(frozen=True)
class Guard:
    """The guard over some clients' data: whose they are, and how often a batch of each phase may be used in a visit (None: not
    known yet, count)."""

    who: str
    secret: Secret
    budget: Mapping[str, int] | None = None
    seen: dict[str, int] = field(default_factory=dict)  # most uses of a batch so far, by phase
    first: Mapping[str, int] = field(default_factory=dict)  # uses before the visit, in a round's earlier exchanges

    def over(self, data: Any, phase: str) -> Guarded:
        """Return the data of one visit, guarded."""
        return Guarded(data, phase, self, dict(self.first))


class Guarded(Mapping[str, Any]):
    """``releases`` is how many private steps one descent takes on each batch (more than one where a batch is repeated)."""

    def __init__(self, data: Any, phase: str, guard: Guard, uses: dict[str, int], releases: int = 1) -> None:
        self.data, self.phase, self.guard, self.uses, self.releases = data, phase, guard, uses, releases

    def unlock(self) -> tuple[Any, Use]:
        """Return the data for a private descent, and which use of these batches in this visit it is."""
        before = self.uses.get(self.phase, 0)
        after = self.uses[self.phase] = before + self.releases
        self.guard.seen[self.phase] = max(after, self.guard.seen.get(self.phase, 0))
        budget = self.guard.budget
        if budget is not None and after > budget.get(self.phase, 0):
            raise InvalidArgument(
                f"{self.guard.who} uses its batches ({self.phase}) {after} times in a round, but {budget.get(self.phase, 0)} "
                "are accounted for; let it do so in its first rounds as well, or leave privacy out"
            )
        return self.data, Use(before, self.guard.secret)

    def anew(self) -> Guarded:
        """Return the same data as at the beginning of a visit."""
        return self.guard.over(self.data, self.phase)

    def batch(self, data: Mapping[str, Any]) -> Guarded:
        """Return one of the batches, guarded as the data are."""
        return Guarded(data, self.phase, self.guard, self.uses)

    def repeated(self, data: Any, steps: int) -> Guarded:
        """Return a batch as data for several steps."""
        return Guarded(data, self.phase, self.guard, self.uses, steps)

    def __getitem__(self, name: str) -> Any:
        if name in ROWS:
            rows = "validation rows" if name == "val" else "rows"
            raise InvalidArgument(
                f"{self.guard.who} looks at a client's {rows} outside a private descent, so it cannot be private; "
                "use another method, or leave privacy out"
            )
        value = self.data[name]
        return value if name in OPEN else Guarded(value, name, self.guard, self.uses)

    def __contains__(self, name: object) -> bool:
        return name in self.data

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)
