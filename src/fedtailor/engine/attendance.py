"""Who takes part in a round, where the user says it: a function, or a table of who was there when.

The function is given (number of the round, the clients' names, a NumPy generator of that round) and returns names; or (who is
there, of these whose upload is lost after training); or both and a dict of those who are slow: the share of its steps that each
manages. A table has the columns round, client and, if wanted, lost and pace; after its last round it begins again.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedtailor.algorithms import origin
from fedtailor.data import rng
from fedtailor.data.federation import Federation
from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.runs import files

Ids = NDArray[np.int64]
Who = Callable[[int, tuple[str, ...], np.random.Generator], Any]
TRUE, FALSE = ("1", "true", "yes"), ("", "0", "false", "no")


class Known(NamedTuple):
    """A round's clients, as positions in the federation: those who are there, those of them whose upload is lost, and the share
    of its steps that each client manages (None: all of them)."""

    there: Ids
    lost: Ids
    paces: NDArray[np.float64] | None


class Attendance:
    """``(there, lost)`` of a round, as positions in the federation; the same whenever it is asked."""

    def __init__(self, asked: str, federation: Federation, seed: int, roll_call: bool = False) -> None:
        self.federation, self.seed, self.roll_call = federation, seed, roll_call
        self.name = asked if asked.endswith(".csv") else origin.name_of(asked)
        self.who: Who = _trace(Path(asked)) if asked.endswith(".csv") else origin.function_of(asked)
        self._known: dict[int, Known] = {}

    def __call__(self, number: int) -> tuple[Ids, Ids]:
        known = self.known(number)
        return known.there, known.lost

    def paces(self, number: int) -> NDArray[np.float64] | None:
        """Return the share of its steps that each client manages; None where nobody is slow."""
        return None if self.roll_call and number == 0 else self.known(number).paces

    def known(self, number: int) -> Known:
        """Return what the user says of a round."""
        if number not in self._known:
            self._known[number] = self._ask(number)
        return self._known[number]

    def _ask(self, number: int) -> Known:
        names = tuple(self.federation.names[i] for i in self.federation.order)  # however the federation lists them
        try:
            answer = self.who(number, names, rng.generator(self.seed, "attendance", number))
            there, lost, slow = (*(answer if _is_several(answer) else (answer,)), (), {})[:3]
            there, lost, slow = list(there), list(lost), dict(slow)
        except InvalidArgument:
            raise
        except Exception as error:
            raise InvalidArgument(f"the cohort {self.name} fails in round {number} ({type(error).__name__}: {error})") from error
        for client in (*there, *lost, *slow):
            if client not in self.federation.positions:
                raise InvalidArgument(f"the cohort {self.name} names {client!r} in round {number}, which is no client")
        if missing := sorted(set(lost) - set(there)):
            raise InvalidArgument(f"the cohort {self.name} loses {missing[0]!r} in round {number}, who is not there")
        for client, pace in slow.items():
            if isinstance(pace, bool) or not isinstance(pace, Real) or not 0 < float(pace) <= 1:
                raise InvalidArgument(
                    f"the cohort {self.name} gives {client!r} the pace {pace!r} in round {number}; it is the share of its steps "
                    "that a client manages, above 0 and up to 1"
                )
        return Known(self._ids(there), self._ids(lost), self._paces(slow))

    def _ids(self, names: Iterable[str]) -> Ids:
        return np.array(sorted({self.federation.positions[name] for name in names}), np.int64)

    def _paces(self, slow: Mapping[str, float]) -> NDArray[np.float64] | None:
        if not slow:
            return None
        paces = np.ones(len(self.federation))
        for name, pace in slow.items():
            paces[self.federation.positions[name]] = pace
        return paces


def _is_several(answer: Any) -> bool:
    return isinstance(answer, tuple) and len(answer) in (2, 3) and not any(isinstance(part, str) for part in answer)


def _trace(path: Path) -> Who:
    """Return the function that a table of attendance stands for."""
    try:
        rows = list(csv.DictReader(io.StringIO(files.read(path).decode("utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidData(f"{path} cannot be read as a table of attendance ({error}); give a .csv file") from error
    if not rows or not {"round", "client"} <= set(rows[0]):
        raise InvalidData(
            f"{path} needs the columns round and client, and rows; lost and pace are for lost uploads and slow clients"
        )
    there: dict[int, list[str]] = {}
    lost: dict[int, list[str]] = {}
    slow: dict[int, dict[str, float]] = {}
    for line, row in enumerate(rows, 2):
        number, mark = (row["round"] or "").strip(), (row.get("lost") or "").strip().lower()
        if not number.isdecimal() or mark not in (*TRUE, *FALSE):
            raise InvalidData(f"line {line} of {path}: round is a whole number from 0 on, and lost is 0 or 1")
        if pace := (row.get("pace") or "").strip():
            try:
                slow.setdefault(int(number), {})[row["client"]] = float(pace)
            except ValueError:
                raise InvalidData(f"line {line} of {path}: pace is a number above 0 and up to 1, not {pace!r}") from None
        there.setdefault(int(number), []).append(row["client"])
        if mark in TRUE:
            lost.setdefault(int(number), []).append(row["client"])
    length = max(there) + 1

    def who(number: int, names: tuple[str, ...], draw: np.random.Generator) -> tuple[list[str], list[str], dict[str, float]]:
        place = number % length
        return there.get(place, []), lost.get(place, []), slow.get(place, {})

    return who
