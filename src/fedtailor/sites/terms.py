"""Terms: how patient and how strict a server is; and its ledger of what it knows of its sites."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedtailor.errors import InvalidArgument
from fedtailor.sites.replies import Columns

ROBUST = ("mean", "median", "trimmed", "krum", "geometric-median")


@dataclass(frozen=True)
class Terms:
    """The server's terms: how patient and how strict it is.

    ``deadline`` is in seconds, for one exchange. With fewer than ``least`` uploads an exchange is asked for again, ``attempts``
    times in all, after ``pause`` seconds. An upload whose norm is ``factor`` times the median is refused. ``reduce`` is what is
    done in place of the mean (``server/reduce.py``), where the method takes the mean. With ``secure`` the server sees sums of
    ``threshold`` uploads or more, and no single one (``pact``), of numbers in ``bits`` bits, none larger than ``largest``.
    """

    deadline: float = 600.0
    least: int = 1
    attempts: int = 3
    pause: float = 2.0
    factor: float = 100.0
    reduce: str = "mean"
    secure: bool = False
    threshold: int | None = None
    bits: int = 64
    largest: float | None = None

    def __post_init__(self) -> None:
        if self.reduce not in ROBUST:
            raise InvalidArgument(f"reduce must be one of {', '.join(ROBUST)}, not {self.reduce!r}")
        for name in ("deadline", "least", "attempts", "factor"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} must be greater than 0, not {getattr(self, name)!r}")
        if self.secure and self.reduce != "mean":
            raise InvalidArgument(
                f"reduce = {self.reduce!r} looks at single uploads, which secure sums hide; leave one of them out"
            )


@dataclass
class Ledger:
    """What the server knows of its sites: the version of each one's state that it builds on, and what went wrong."""

    run: str
    versions: dict[str, int]
    events: list[dict[str, Any]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)  # by client, where scores are written down under pseudonyms

    def facts(self) -> dict[str, Any]:
        known = {"run": self.run, "versions": self.versions, "events": self.events, "norms": self.norms}
        return {**known, "aliases": self.aliases} if self.aliases else known

    def shown(self, clients: Sequence[str], columns: Columns | None) -> tuple[Sequence[str], Columns | None]:
        """Return the clients' names and columns as they are written down."""
        if not self.aliases:
            return clients, columns
        names = [self.aliases[name] for name in clients]
        order = np.argsort(names)
        return [names[i] for i in order], columns and {name: values[order] for name, values in columns.items()}

    def note(self, number: int, client: str, text: str) -> None:
        self.events.append({"round": number, "client": client, "what": text})


def pseudonyms(clients: Sequence[str]) -> dict[str, str]:
    """Return a pseudonym for every client, dealt out anew for every run."""
    numbers = list(range(1, len(clients) + 1))
    secrets.SystemRandom().shuffle(numbers)
    return {name: f"site {number:0{len(str(len(clients)))}d}" for name, number in zip(clients, numbers, strict=True)}
