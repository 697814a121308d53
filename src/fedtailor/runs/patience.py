"""Ctrl-C (and a polite kill) wait until the round is whole, so that the last checkpoint is the last round."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(SystemExit):
    """SIGTERM asked the process to end; nobody who catches ordinary errors stands in its way."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class StopRequest:
    """``asked`` is the signal that came, or None."""

    asked: int | None = None

    def stop(self) -> None:
        """Raise what the signal stands for, if one came."""
        if self.asked is not None:
            raise_for(self.asked)


@contextmanager
def patience(wanted: bool) -> Iterator[StopRequest]:
    """Hold the signals back while ``wanted``, at most to the end of this context; the second one is not held."""
    patient = StopRequest()
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield patient
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, frame: Any) -> None:
        patient.asked = number
        if sys.stderr.isatty():
            sys.stderr.write("\nstopping after this round; once more to stop at once\n")
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield patient
    finally:
        restore()
    patient.stop()


_noted: int | None = None  # the signal that asked the command of this process to end


def noted() -> int | None:
    """Return the signal that asked this command to end, if one came, whatever became of what it raised."""
    return _noted


def stop_if_noted() -> None:
    """Raise once more what a signal raised, for whoever met another error or none: somebody on the way may have swallowed it."""
    if _noted is not None:
        raise_for(_noted)


def raise_for(number: int) -> NoReturn:
    """Raise what a signal stands for."""
    if number == signal.SIGTERM:
        raise Terminated
    raise KeyboardInterrupt


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Note SIGINT and SIGTERM and raise what they stand for, so that what is open is closed and what is running is ended.

    They are raised wherever the interpreter is at that moment, where other code may turn them into an error of its own (torch
    does, on its way into and out of ``vmap``) or lose them (a finalizer); hence the note.
    """
    global _noted
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        global _noted
        _noted = number
        raise_for(number)

    def lost(report: Any) -> None:
        if not isinstance(report.exc_value, KeyboardInterrupt | Terminated):
            hook(report)

    hook, before = sys.unraisablehook, {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGINT] is not signal.default_int_handler:  # a job in the background ignores it
        del before[signal.SIGINT]
    _noted, sys.unraisablehook = None, lost
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _noted, sys.unraisablehook = None, hook
