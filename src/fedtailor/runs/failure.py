"""Failure: why a method of a comparison could not be measured."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from fedtailor.errors import BadRun, CannotWrite, Diverged, FedtailorError, WorkerDied, WorkerStuck

OUTSIDE = (BadRun, CannotWrite, MemoryError, WorkerDied, WorkerStuck)  # the machine's or the directory's: another day they pass
NO_MEMORY = ("not enough memory", "can't allocate memory")  # as torch says it


@dataclass(frozen=True)
class Failure:
    """The reason in one line, whether the method would fail in the same way again, and the error with its traceback."""

    reason: str
    final: bool
    error: Exception | None = None
    trace: str = ""

    @staticmethod
    def of(error: Exception, where: str = "") -> Failure:
        """Return the failure that an error amounts to; ``where`` stands before the reason."""
        if isinstance(error, Diverged):
            reason = error.brief
        elif isinstance(error, FedtailorError):
            reason = " ".join(str(error).split())
        else:
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
        return Failure(where + reason, isinstance(error, Diverged), error, "".join(traceback.format_exception(error)))


def blameless(error: Exception) -> bool:
    """Return whether an error says nothing about the method: it ends a comparison, which can go on later."""
    return isinstance(error, OUTSIDE) or (isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY))
