"""Everything fedtailor refuses, by name. Each message says what is wrong and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class FedtailorError(Exception):
    """Base of every error raised on purpose; the command line prints it in one line and exits with 2."""


class InvalidArgument(FedtailorError, ValueError):
    """An argument is outside its range or of the wrong kind."""


class InvalidData(FedtailorError, ValueError):
    """A client's arrays cannot be used; the message names the client."""


class ModelMismatch(FedtailorError, ValueError):
    """The model's output does not fit the labels, or its input does not fit the features."""


class Diverged(FedtailorError, ArithmeticError):
    """Training produced a number that is not finite."""

    def __init__(self, round: int, clients: Sequence[str], what: str) -> None:
        shown = ", ".join(clients[:5]) + (f" and {len(clients) - 5} more" if len(clients) > 5 else "")
        super().__init__(
            f"training diverged in round {round}: {what} of {'client' if len(clients) == 1 else 'clients'} {shown} "
            "is not finite; use a smaller lr (or server_lr), or standardise the features"
        )
        self.round = round
        self.clients = list(clients)
        self._what = what

    def __reduce__(self) -> tuple[type[Diverged], tuple[int, list[str], str]]:
        return type(self), (self.round, self.clients, self._what)  # it may come home from a worker process


class CannotWrite(FedtailorError, OSError):
    """A file could not be written (no room, no permission)."""


class BadRun(FedtailorError, ValueError):
    """A run directory cannot be used: damaged, of a newer version, or of another run."""


class WorkerDied(FedtailorError, RuntimeError):
    """A worker process ended without an answer (most often: killed for lack of memory)."""


class LawBroken(FedtailorError, AssertionError):
    """An algorithm breaks one of the ten laws; the message says which, where and by how much."""


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """A hint: the name that was probably meant, or all there are."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(names)}"
