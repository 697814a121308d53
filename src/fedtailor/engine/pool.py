"""Worker processes: forked once, one thread each, given one client at a time.

They are forked (not spawned), so models and data need not be picklable and are not copied. Tensors pass through memory that
parent and child share; the pipe carries only what says where they lie.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fedtailor.errors import FedtailorError, InvalidArgument, WorkerDied, WorkerStuck

Job = tuple[Callable[..., Any], int, tuple[Any, ...]]
ALIGN = 64
POLL = 0.5  # seconds between two looks at workers that do not answer
TIMEOUT = 600.0  # seconds without an answer and without computing after which a worker counts as stuck
PARENTS = (signal.SIGINT, signal.SIGTERM)  # the signals that are the parent's to handle: they reach a whole process group


def cores() -> int:
    """Return how many cores this process may use (1 where it cannot, or may not, fork)."""
    if not sys.platform.startswith("linux") or multiprocessing.current_process().daemon:
        return 1
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class _Place:
    """A tensor in shared memory."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Memory:
    """Memory that one side writes and the other reads; it grows as needed. Made before the fork, seen by both."""

    def __init__(self) -> None:
        self._file = os.memfd_create("fedtailor")
        self._map: mmap.mmap | None = None

    def _reach(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return self._map

    def write(self, value: Any) -> tuple[Any, int]:
        """Return (``value`` with its tensors replaced by their places, bytes used)."""
        tensors: list[tuple[Tensor, _Place]] = []
        used = 0

        def place(leaf: Any) -> Any:
            nonlocal used
            if not isinstance(leaf, Tensor):
                return leaf
            tensors.append((leaf, _Place(used, tuple(leaf.shape), leaf.dtype)))
            used += -(-leaf.numel() * leaf.element_size() // ALIGN) * ALIGN
            return tensors[-1][1]

        placed = _convert(value, place)
        memory = self._reach(used) if used else None
        for tensor, where in tensors:
            if tensor.numel():
                assert memory is not None
                self._view(memory, where).copy_(tensor.detach())
        return placed, used

    def read(self, message: tuple[Any, int], copy: bool) -> Any:
        """Return the value written; without ``copy`` its tensors are the memory itself, good until the next write."""
        placed, used = message
        memory = self._reach(used) if used else None

        def fetch(leaf: Any) -> Any:
            if not isinstance(leaf, _Place):
                return leaf
            if memory is None or 0 in leaf.shape:
                return torch.empty(leaf.shape, dtype=leaf.dtype)
            view = self._view(memory, leaf)
            return view.clone() if copy else view

        return _convert(placed, fetch)

    @staticmethod
    def _view(memory: mmap.mmap, where: _Place) -> Tensor:
        count = int(torch.Size(where.shape).numel())
        return torch.frombuffer(memory, dtype=where.dtype, count=count, offset=where.start).view(where.shape)

    def close(self) -> None:
        os.close(self._file)


def _convert(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {k: _convert(v, leaf) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_convert(v, leaf) for v in value)
    if is_dataclass(value) and not isinstance(value, (type, _Place)):
        return replace(value, **{f.name: _convert(getattr(value, f.name), leaf) for f in fields(value)})
    return leaf(value)


class _Worker:
    """The parent's end of one worker."""

    def __init__(self, context: Any, shared: _Memory, siblings: list[_Worker]) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self.down, self.up = _Memory(), _Memory()
        # a worker must not hold its siblings' pipes: it would never see the parent's death
        foreign = [self.pipe, *(other.pipe for other in siblings)]
        arguments = (context, theirs, shared, self.down, self.up, foreign)
        self.process = fork.Process(target=_serve, args=arguments, daemon=True)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS)  # until the child ignores them
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()

    def give(self, job: Job) -> None:
        self.pipe.send(("job", self.down.write(job)))

    def take(self) -> Any:
        good, answer = self.pipe.recv()
        if not good:
            raise answer
        return self.up.read(answer, copy=True)

    def activity(self) -> tuple[bool, tuple[str, ...]]:
        """Return whether a signal has stopped the worker, and its CPU time so far, in user and kernel mode."""
        try:
            state, *fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just died, which its pipe will say
            return False, ()
        return state in "Tt", tuple(fields[10:12])

    def close(self) -> None:
        self.pipe.close()
        self.process.join(timeout=1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.down.close()
        self.up.close()


class WorkerPool:
    """Worker processes; ``run`` gives the results of jobs in the order of the jobs, whichever worker did them."""

    def __init__(self, context: Any, size: int, timeout: float = TIMEOUT) -> None:
        if size > 1 and multiprocessing.current_process().daemon:
            raise InvalidArgument("a daemonic process may not start worker processes; use workers=1")
        if not sys.platform.startswith("linux"):
            raise InvalidArgument("worker processes are forked, which is safe on Linux only; use workers=1")
        self.size, self.timeout = size, timeout
        self._shared = _Memory()
        self._workers: list[_Worker] = []
        for _ in range(size):
            self._workers.append(_Worker(context, self._shared, self._workers))
        # workers ignore SIGTERM, with which Python ends the processes that are left at its exit
        self._end = Finalize(self, _close, (self._workers, self._shared), exitpriority=0)

    def run(self, shared: Any, jobs: Iterator[Job]) -> Iterator[Any]:
        """Yield the result of each job, which is ``function(context, shared, client, *arguments)``."""
        try:
            message = self._shared.write(shared)
            for worker in self._workers:
                worker.pipe.send(("shared", message))
            yield from self._in_order(jobs)
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            codes = [w.process.exitcode for w in self._workers if w.process.exitcode is not None]
            self.close()
            raise WorkerDied(
                f"a worker process died (exit code {codes[0] if codes else 'unknown'}), most often for lack of memory; "
                "use fewer workers=, or workers=1"
            ) from error
        except BaseException:
            self.close()  # a job may be under way: its answer must not be taken for that of a later one
            raise

    def _in_order(self, jobs: Iterator[Job]) -> Iterator[Any]:
        idle, busy, done = list(self._workers), dict[Connection, tuple[_Worker, int]](), dict[int, Any]()
        sent = returned = 0
        ended = False
        while True:
            while idle and not ended:
                job = next(jobs, None)
                if job is None:
                    ended = True
                    break
                worker = idle.pop()
                worker.give(job)
                busy[worker.pipe] = worker, sent
                sent += 1
            while returned in done:
                yield done.pop(returned)
                returned += 1
            if not busy:
                if ended:
                    return
                continue
            for pipe in self._answered(busy):
                worker, number = busy.pop(pipe)
                done[number] = worker.take()
                idle.append(worker)

    def _answered(self, busy: Mapping[Connection, tuple[_Worker, int]]) -> list[Connection]:
        """Wait for answers and return their pipes; refuse to wait for ever for a worker that does not compute either."""
        seen: dict[Connection, tuple[tuple[str, ...], float]] = {}
        while not (pipes := wait(list(busy), POLL)):
            for pipe, (worker, _) in busy.items():
                stopped, cpu = worker.activity()
                before, idle = seen.get(pipe, ((), 0.0))
                idle = idle + POLL if cpu == before else 0.0  # by looks, not by the clock: we may have been stopped as well
                seen[pipe] = cpu, idle
                if idle >= self.timeout:
                    why = "was stopped by a signal" if stopped else "does nothing"
                    raise WorkerStuck(
                        f"worker process {worker.process.pid} {why} and has not answered for {idle:g} seconds, so the run was "
                        "ended; resume it, or use workers=1, or a longer worker_timeout="
                    )
        return cast(list[Connection], pipes)

    def close(self) -> None:
        """End the workers, whatever they are at."""
        self._end()
        self._workers = []


def _close(workers: Sequence[_Worker], shared: _Memory) -> None:
    for worker in workers:
        worker.close()
    shared.close()


def _keep_memory() -> None:
    """Tell glibc to keep freed blocks: a large network otherwise spends a tenth of its time on fresh pages."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        trim, top_pad, map_from = -1, -2, -3  # mallopt's names for them, malloc.h
        for option, value in ((trim, 2**31 - 1), (top_pad, 2**26), (map_from, 2**30)):
            libc.mallopt(option, value)


def _serve(context: Any, pipe: Connection, common: _Memory, down: _Memory, up: _Memory, foreign: list[Connection]) -> None:
    for number in PARENTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS)
    for other in foreign:
        other.close()
    torch.set_num_threads(1)
    _keep_memory()
    shared: Any = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            kind, message = pipe.recv()
            if kind == "shared":
                shared = common.read(message, copy=False)
                continue
            function, client, arguments = down.read(message, copy=False)
            try:
                pipe.send((True, up.write(function(context, shared, client, *arguments))))
            except FedtailorError as error:
                pipe.send((False, error))
            except Exception as error:
                first = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
                text = "".join(traceback.format_exception(error))
                pipe.send((False, RuntimeError(f"{first} (in a worker process, client {client})\n{text}")))
