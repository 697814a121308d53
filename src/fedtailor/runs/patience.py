"""Ctrl-C (and a polite kill) wait until the round is whole, so that the last checkpoint is the last round."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Patience:
    """``asked`` is the signal that came, or None."""

    asked: int | None = None

    def stop(self) -> None:
        """What the signal would have done."""
        if self.asked == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt


@contextmanager
def patience(wanted: bool) -> Iterator[Patience]:
    """Hold the signals back while ``wanted``; the second one is not held."""
    held = Patience()
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = {which: signal.getsignal(which) for which in SIGNALS}

    def note(number: int, frame: Any) -> None:
        held.asked = number
        if sys.stderr.isatty():
            sys.stderr.write("\nstopping after this round; once more to stop at once\n")
        for which, handler in before.items():
            signal.signal(which, handler)

    for which in SIGNALS:
        signal.signal(which, note)
    try:
        yield held
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
