"""The exceptions of fedtailor. Each message says what is wrong and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class FedtailorError(Exception):
    """Base of every error raised on purpose; the command line prints it in one line and exits with 2."""


class InvalidArgument(FedtailorError, ValueError):
    """An argument is outside its range or of the wrong kind."""


class UnknownSetting(InvalidArgument, TypeError):
    """There is no setting (or keyword argument) of this name; the message has the one that was probably meant."""


class InvalidData(FedtailorError, ValueError):
    """A client's arrays cannot be used; the message names the client."""


class ModelMismatch(FedtailorError, ValueError):
    """The model's output does not fit the labels, or its input does not fit the features."""


class Diverged(FedtailorError, ArithmeticError):
    """Training produced a number that is not finite, or a loss that is absurd (``engine.divergence``)."""

    def __init__(
        self, round: int, clients: Sequence[str], quantity: str, lr: float | None = None, fault: str = "is not finite"
    ) -> None:
        self.brief = f"diverged in round {round}" + ("" if lr is None else f", lr = {lr:g}")
        shown = ", ".join(clients[:5]) + (f" and {len(clients) - 5} more" if len(clients) > 5 else "")
        super().__init__(
            f"training {self.brief}: {quantity} of {'client' if len(clients) == 1 else 'clients'} {shown} "
            f"{fault}; use a smaller lr (or server_lr), or standardise the features"
        )
        self.round = round
        self.clients = list(clients)
        self.lr = lr
        self._details = quantity, fault

    def __reduce__(self) -> tuple[type[Diverged], tuple[int, list[str], str, float | None, str]]:
        quantity, fault = self._details
        return type(self), (self.round, self.clients, quantity, self.lr, fault)  # it may be sent from a worker process


class NothingMeasured(FedtailorError, RuntimeError):
    """No method of a comparison could be measured; the message says why, method by method."""


class CannotWrite(FedtailorError, OSError):
    """A file could not be written (no room, no permission)."""


class BadRun(FedtailorError, ValueError):
    """A run directory cannot be used: damaged, of a newer version, or of another run."""


class DamagedRun(BadRun):
    """A file of a run directory is missing, or is not what was written."""


class WorkerDied(FedtailorError, RuntimeError):
    """A worker process ended without a result (most often: killed for lack of memory)."""


class WorkerStuck(FedtailorError, RuntimeError):
    """A worker process is there but does nothing (most often: it was stopped by a signal)."""


class TooFewSites(FedtailorError, RuntimeError):
    """Too few sites answered to go on; what was done so far is kept."""


class SiteRefused(FedtailorError, ConnectionError):
    """A site and a server did not accept each other; the message says why."""


class LawBroken(FedtailorError, AssertionError):
    """An algorithm breaks one of the ten laws; the message says which, where and by how much."""


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint: the name that was probably meant, or all there are."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(names)}"
