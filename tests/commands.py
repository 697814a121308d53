"""Commands in processes of their own, forked so that nothing is imported again, to be stopped and killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fedtailor.advisor import pilot, walk
from fedtailor.cli import app
from fedtailor.engine import run

FORK = multiprocessing.get_context("fork")


@cache
def warm_up() -> None:
    """Import here, once, what commands import when they need it: every process forked from this one has it then."""
    import pandas  # noqa: F401
    import rich.progress
    import rich.table  # noqa: F401

    from fedtailor.advisor import advise  # noqa: F401
    from fedtailor.algorithms import FedAvg
    from fedtailor.data import load
    from fedtailor.engine.run import run as play
    from fedtailor.report import page  # noqa: F401

    play(FedAvg(), load("digits", clients=2), "mlp", rounds=1, engine="vectorized")


class Command:
    """A command line at work, in a process group of its own; ``on_round`` is called there after every round played."""

    def __init__(self, *words: Any, on_round: Callable[[], None] = lambda: None) -> None:
        warm_up()
        self.words, self.on_round = [str(word) for word in words], on_round
        self.process = FORK.Process(target=self._serve)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def _serve(self) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 (in place of pytest's)
        for module in (run, pilot, walk):
            module.play_on = self._telling(module.play_on)  # type: ignore[attr-defined]
        app(self.words)

    def _telling(self, play_on: Any) -> Any:
        def play(*arguments: Any, **more: Any) -> Any:
            for rnd in play_on(*arguments, **more):
                self.on_round()
                yield rnd

        return play

    def alive(self) -> bool:
        return self.process.is_alive()

    def wait(self, seconds: float = 60.0) -> tuple[int | None, str, str]:
        """Wait for the end and return (exit code, stdout, stderr)."""
        self.process.join(seconds)
        assert not self.process.is_alive(), "it does not end"
        return self.process.exitcode, Path("stdout").read_text(), Path("stderr").read_text()

    def kill(self) -> bool:
        """Kill it and its workers; True if it was still at work."""
        alive = self.alive()
        self.process.kill()
        self.process.join()
        return alive


def appears(path: str | Path, alive: Callable[[], bool], seconds: float = 60.0) -> bool:
    """True once the file is there; False if nobody is left who would write it."""
    until = time.perf_counter() + seconds
    while not Path(path).exists():
        if not alive() or time.perf_counter() > until:
            return Path(path).exists()
        time.sleep(0.002)
    return True


def group_ended(group: int, seconds: float = 10.0) -> bool:
    """True once no process of the group is left."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False
