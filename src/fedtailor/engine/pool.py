"""Worker processes: forked once, one thread each, fed one client at a time over a pipe.

They are forked (not spawned), so models and data need not be picklable and are not copied. What travels is trees of
tensors, as NumPy arrays, between a process and its own children.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedtailor.errors import FedtailorError, WorkerDied

Job = tuple[Callable[..., Any], int, tuple[Any, ...]]


def cores() -> int:
    """Cores this process may use (1 where processes cannot be forked safely)."""
    if not sys.platform.startswith("linux"):
        return 1
    return len(os.sched_getaffinity(0))


class _Array:
    """A tensor on the pipe."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array


def _dump(value: Any) -> bytes:
    return pickle.dumps(_convert(value, lambda v: _Array(v.detach().numpy()) if isinstance(v, Tensor) else v), protocol=5)


def _load(data: bytes) -> Any:
    return _convert(pickle.loads(data), lambda v: torch.from_numpy(v.array) if isinstance(v, _Array) else v)


def _convert(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {k: _convert(v, leaf) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_convert(v, leaf) for v in value)
    return leaf(value)


class Pool:
    """``run`` gives the results of jobs in the order of the jobs, whichever worker did them."""

    def __init__(self, context: Any, size: int) -> None:
        self.size = size
        fork = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = fork.Pipe()
            # a worker must not hold its siblings' ends: it would never see the parent's death
            process = fork.Process(target=_serve, args=(context, theirs, [*self._pipes, ours]), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, shared: Any, jobs: Iterator[Job]) -> Iterator[Any]:
        message = _dump(shared)
        try:
            for pipe in self._pipes:
                pipe.send_bytes(b"s" + message)
            yield from self._in_order(jobs)
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            codes = [p.exitcode for p in self._processes if p.exitcode is not None]
            self.close()
            raise WorkerDied(
                f"a worker process died (exit code {codes[0] if codes else 'unknown'}), most often for lack of memory; "
                "use fewer workers=, or workers=1"
            ) from error

    def _in_order(self, jobs: Iterator[Job]) -> Iterator[Any]:
        idle, busy, done = list(self._pipes), dict[Connection, int](), dict[int, Any]()
        sent = given = 0
        ended = False
        while True:
            while idle and not ended:
                job = next(jobs, None)
                if job is None:
                    ended = True
                    break
                pipe = idle.pop()
                pipe.send_bytes(b"j" + _dump(job))
                busy[pipe] = sent
                sent += 1
            while given in done:
                yield done.pop(given)
                given += 1
            if not busy:
                if ended:
                    return
                continue
            for ready in wait(list(busy)):
                pipe = cast(Connection, ready)
                good, value = _load(pipe.recv_bytes())
                if not good:
                    self.close()
                    raise value
                done[busy.pop(pipe)] = value
                idle.append(pipe)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=1)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []


def _serve(context: Any, pipe: Connection, others: list[Connection]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for other in others:
        other.close()
    torch.set_num_threads(1)
    shared: Any = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            message = pipe.recv_bytes()
            if message[:1] == b"s":
                shared = _load(message[1:])
                continue
            function, client, arguments = _load(message[1:])
            try:
                result = True, function(context, shared, client, *arguments)
            except FedtailorError as error:
                result = False, error
            except Exception as error:
                text = "".join(traceback.format_exception(error))
                result = False, RuntimeError(f"in a worker process, client {client}:\n{text}")
            pipe.send_bytes(_dump(result))
