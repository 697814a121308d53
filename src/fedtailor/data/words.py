"""How values, names and errors are written in a message: quoted, in one line, not too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from fedtailor.errors import InvalidArgument

Where = Callable[[int], str]


def text(value: Any) -> str:
    """Return a value as it reads in a table: 3.0 is "3", midnight is the date."""
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)
    return str(value).removesuffix(" 00:00:00").encode("utf-8", "replace").decode()


def shown(value: Any) -> str:
    """Return a value quoted for a message."""
    quoted = repr(text(value))
    return quoted if len(quoted) <= 60 else f"{quoted[:56]}...'"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return the first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown(name) for name in names[:most]) + more


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural but for 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def row_number(row: int) -> str:
    return f"row {row + 1}"


def check_choice(option: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidArgument(f"{option}={shown(value)} is unknown; use one of {', '.join(choices)}")
