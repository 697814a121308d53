"""Text from data where it goes: on a terminal, into the cells of a spreadsheet, into the names of files."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    import pandas as pd

FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
    "\n",
    "\uff1d",
    "\uff0b",
    "\uff0d",
    "\uff20",
)  # (the last are wide) how a formula begins
LONGEST = 120  # characters of a client's name in the name of a file
RESERVED = {"con", "prn", "aux", "nul", *(f"{device}{n}" for device in ("com", "lpt") for n in range(1, 10))}  # on Windows


def printable(value: Any) -> Any:
    """Return a text with its control characters escaped, so that no name can steer a terminal; of lists and tables, all texts."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(c if _is_harmless(c) else c.encode("unicode_escape").decode() for c in value)
    if isinstance(value, dict):
        return {printable(key): printable(entry) for key, entry in value.items()}
    return [printable(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _is_harmless(character: str) -> bool:
    """Return whether a character moves, hides and reorders nothing on a terminal; words of some scripts need the joiners."""
    return character in "\u200c\u200d" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def quoted_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with an apostrophe before every text, titles too, that a spreadsheet would take for a formula."""
    quoted = table.rename(columns=_quoted_formula)
    texts = [i for i, kind in enumerate(quoted.dtypes) if kind.kind not in "biufcmM"]
    for i in texts:
        quoted.isetitem(i, [_quoted_formula(value) for value in quoted.iloc[:, i]])
    return quoted


def _quoted_formula(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def file_names(names: Sequence[str]) -> dict[str, str]:
    """Return a name for a file of each client that every file system takes, and no two of which are the same on any."""
    plain = {name: quote(name, safe=" ()[]=,@+", errors="replace") or "_" for name in names}
    count = Counter(file.lower() for file in plain.values())
    return {
        name: file if _is_usable(file) and count[file.lower()] == 1 else _numbered(name, file) for name, file in plain.items()
    }


def _is_usable(file: str) -> bool:
    return len(file) <= LONGEST and file.split(".")[0].lower() not in RESERVED


def _numbered(name: str, file: str) -> str:
    """Return the beginning of the name and a digest of it, which does not depend on the other clients."""
    return f"{file[: LONGEST // 2]}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}"
