"""Who takes part in a round, where the user says it: a function, or a table of who was there when.

The function is given (number of the round, the clients' names, a NumPy generator of that round) and returns names, or a pair:
who is there, and of these whose upload is lost after training. A table has the columns round, client and, if wanted, lost; after
its last round it begins again.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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


class Attendance:
    """``(there, lost)`` of a round, as positions in the federation; the same whenever it is asked."""

    def __init__(self, asked: str, federation: Federation, seed: int) -> None:
        self.federation, self.seed = federation, seed
        self.name = asked if asked.endswith(".csv") else origin.name_of(asked)
        self.who: Who = _trace(Path(asked)) if asked.endswith(".csv") else origin.function_of(asked)
        self._known: dict[int, tuple[Ids, Ids]] = {}

    def __call__(self, number: int) -> tuple[Ids, Ids]:
        if number not in self._known:
            self._known[number] = self._ask(number)
        return self._known[number]

    def _ask(self, number: int) -> tuple[Ids, Ids]:
        names = tuple(self.federation.names[i] for i in self.federation.order)  # however the federation lists them
        try:
            answer = self.who(number, names, rng.generator(self.seed, "attendance", number))
            there, lost = answer if _is_pair(answer) else (answer, ())
            there, lost = list(there), list(lost)
        except InvalidArgument:
            raise
        except Exception as error:
            raise InvalidArgument(f"the cohort {self.name} fails in round {number} ({type(error).__name__}: {error})") from error
        for client in (*there, *lost):
            if client not in self.federation.positions:
                raise InvalidArgument(f"the cohort {self.name} names {client!r} in round {number}, which is no client")
        if missing := sorted(set(lost) - set(there)):
            raise InvalidArgument(f"the cohort {self.name} loses {missing[0]!r} in round {number}, who is not there")
        return self._ids(there), self._ids(lost)

    def _ids(self, names: Iterable[str]) -> Ids:
        return np.array(sorted({self.federation.positions[name] for name in names}), np.int64)


def _is_pair(answer: Any) -> bool:
    return isinstance(answer, tuple) and len(answer) == 2 and not any(isinstance(part, str) for part in answer)


def _trace(path: Path) -> Who:
    """Return the function that a table of attendance stands for."""
    try:
        rows = list(csv.DictReader(io.StringIO(files.read(path).decode("utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidData(f"{path} cannot be read as a table of attendance ({error}); give a .csv file") from error
    if not rows or not {"round", "client"} <= set(rows[0]):
        raise InvalidData(f"{path} needs the columns round and client, and rows; a column lost is for uploads that are lost")
    there: dict[int, list[str]] = {}
    lost: dict[int, list[str]] = {}
    for line, row in enumerate(rows, 2):
        number, mark = (row["round"] or "").strip(), (row.get("lost") or "").strip().lower()
        if not number.isdecimal() or mark not in (*TRUE, *FALSE):
            raise InvalidData(f"line {line} of {path}: round is a whole number from 0 on, and lost is 0 or 1")
        there.setdefault(int(number), []).append(row["client"])
        if mark in TRUE:
            lost.setdefault(int(number), []).append(row["client"])
    length = max(there) + 1

    def who(number: int, names: tuple[str, ...], draw: np.random.Generator) -> tuple[list[str], list[str]]:
        return there.get(number % length, []), lost.get(number % length, [])

    return who
