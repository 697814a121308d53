"""Functions and commands in processes of their own, which find everything imported, to be stopped and killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from fedtailor.advisor import pilot, walk
from fedtailor.cli import app
from fedtailor.engine import processes, run, several

PRELOADED = list(processes.PRELOADED)
# what commands import when they need it: the server of processes is started with it, in the first test that needs one
processes.PRELOADED += [
    *("pytest", "rich.progress", "rich.table", "typer.testing"),  # not pandas, whose import starts a thread (of pyarrow)
    *("fedtailor.cli", "fedtailor.advisor.advise", "fedtailor.report.page", "fedtailor.engine.compare"),
]


class Apart:
    """A function without arguments at work in a process of its own, whatever it closes over; it has begun."""

    def __init__(self, function: Callable[[], Any]) -> None:
        context = processes.context()
        begun, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_call, args=(theirs, cloudpickle.dumps(function)))  # type: ignore[attr-defined]
        processes.start(self.process)
        theirs.close()
        begun.recv()

    def killed(self, seconds: float) -> bool:
        """Kill it after some seconds; True if it was still at work."""
        self.process.join(seconds)
        alive = self.process.is_alive()
        self.process.kill()
        self.process.join()
        return alive

    def code(self, seconds: float = 60.0) -> int | None:
        """Wait for the end and return its exit code."""
        self.process.join(seconds)
        return self.process.exitcode


def _call(begun: Connection, content: bytes) -> None:
    for number in processes.PARENTS:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.PARENTS)
    os.fsync = lambda descriptor: None  # as in conftest.py
    torch.set_num_threads(1)
    processes.PRELOADED[:] = PRELOADED  # a command with workers has a server of its own
    function = cloudpickle.loads(content)
    begun.send(None)
    function()


class Command:
    """A command line at work, in a process group of its own; ``on_round`` is called there after every round played."""

    def __init__(self, *words: Any, on_round: Callable[[], None] = lambda: None) -> None:
        given = [str(word) for word in words]
        self.process = Apart(lambda: _command(given, on_round)).process
        assert self.process.pid is not None
        self.pid = self.process.pid

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


def _command(words: list[str], on_round: Callable[[], None]) -> None:
    """Be a command, in a process group of its own."""
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 (in place of the server's)
    for module in (run, pilot, walk):
        module.play_on = _telling(module.play_on, on_round)  # type: ignore[attr-defined]
    play = several._play  # a round of all settings that are tuned at once

    def played_together(*arguments: Any) -> None:
        play(*arguments)
        on_round()

    several._play = played_together  # type: ignore[assignment]
    app(words)


def _telling(play_on: Any, on_round: Callable[[], None]) -> Any:
    def play(*arguments: Any, **more: Any) -> Any:
        for rnd in play_on(*arguments, **more):
            on_round()
            yield rnd

    return play
