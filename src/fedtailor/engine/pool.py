"""Worker processes: started once, one thread each, given one client at a time.

What all jobs need (a plan) is sent once; its tensors lie in memory that all workers share and are not copied. Tensors of jobs
pass through shared memory as well; the pipe carries only what says where they lie.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, cast

import torch
from torch import Tensor

from fedtailor.engine import parcel, processes
from fedtailor.engine.memory import Memory, Place
from fedtailor.engine.processes import activity, cores
from fedtailor.engine.worker import habits, serve
from fedtailor.errors import InvalidArgument, WorkerDied, WorkerStuck

__all__ = ["TIMEOUT", "WorkerPool", "cores"]

Job = tuple[Callable[..., Any], int, tuple[Any, ...]]
LARGE = 1024  # bytes from which a tensor of the plan is shared and not copied
POLL = 0.5  # seconds between two looks at workers that do not answer
TIMEOUT = 600.0  # seconds without an answer and without computing after which a worker counts as stuck


class _Shelf:
    """Tensors that all workers read where they lie, each written once."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._end = memory, 0
        self._places: dict[int, Place] = {}
        self._held: list[Tensor] = []  # an id is a tensor's as long as the tensor is there

    def put(self, tensor: Tensor) -> Place | None:
        plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()
        if not plain or tensor.requires_grad or tensor.untyped_storage().nbytes() < LARGE:  # bytes have the whole storage
            return None
        if id(tensor) not in self._places:
            self._places[id(tensor)] = place = self._memory.put(tensor, self._end)
            self._held.append(tensor)
            self._end = place.end
        return self._places[id(tensor)]


class _Worker:
    """The parent's end of one worker."""

    def __init__(self, given: Memory, shared: Memory) -> None:
        context = processes.context()
        self.pipe, theirs = context.Pipe()
        self.down, self.up = Memory(), Memory()
        arguments = (theirs, given, shared, self.down, self.up)
        self.process = context.Process(target=serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        processes.start(self.process)
        theirs.close()

    def give(self, job: Job) -> None:
        self.pipe.send(("job", self.down.write(job)))

    def take(self) -> Any:
        good, answer = self.pipe.recv()
        if not good:
            raise answer
        return None if answer is None else self.up.read(answer, copy=True)

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
        self.size, self.timeout = size, timeout
        self._given, self._shared = Memory(), Memory()
        self._workers: list[_Worker] = []
        # workers ignore SIGTERM, with which Python ends the processes that are left at its exit
        self._end = Finalize(self, _close, (self._workers, (self._given, self._shared)), exitpriority=0)
        try:
            self._begin(context)
        except BaseException:
            self.close()
            raise

    def _begin(self, context: Any) -> None:
        """Start the workers and send them what all jobs need."""
        for _ in range(self.size):
            self._workers.append(_Worker(self._given, self._shared))
        self._send(context)

    def _send(self, context: Any) -> None:
        algorithm = getattr(context, "algorithm", None)
        shelf = _Shelf(self._given)
        try:
            content, secrets = parcel.dumps(context, None if algorithm is None else type(algorithm), shelf.put)
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}; use workers=1") from error
        with self._watched():
            for worker in self._workers:
                worker.pipe.send((content, secrets, habits()))
            loading = {worker.pipe: (worker, number) for number, worker in enumerate(self._workers)}
            while loading:
                for pipe in self._answered(loading):
                    loading.pop(pipe)[0].take()

    def run(self, shared: Any, jobs: Iterator[Job]) -> Iterator[Any]:
        """Yield the result of each job, which is ``function(context, shared, client, *arguments)``."""
        with self._watched():
            message = self._shared.write(shared)
            for worker in self._workers:
                worker.pipe.send(("shared", message))
            yield from self._in_order(jobs)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Close the pool when anything goes wrong; say so where a worker died."""
        try:
            yield
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
                stopped, cpu = activity(worker.process.pid or 0)
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


def _close(workers: Sequence[_Worker], memories: Sequence[Memory]) -> None:
    for worker in workers:
        worker.close()
    for memory in memories:
        memory.close()
