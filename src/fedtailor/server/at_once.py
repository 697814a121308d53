"""Passes of one network through several sets of rows, as many at once as there are cores; numbers do not depend on how many.

A network's parameters are put into its module for a pass, so that two threads need two copies of the module.
"""

from __future__ import annotations

import copy
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedtailor.task import Task

Apply = Callable[[Any, Tensor], Tensor]
Out = TypeVar("Out")
SMALL = 10_000  # parameters; a pass of fewer ends before a thread has begun
_copies: WeakKeyDictionary[Task, list[Apply]] = WeakKeyDictionary()


def at_once(task: Task, jobs: Sequence[Callable[[Apply], Out]], x: Tensor) -> list[Out]:
    """Return what each job comes to, given the ``apply`` of ``task`` (or of a copy of it); ``x`` are rows like theirs.

    A job must compute the same in any thread: it begins with gradients recorded, and one thread for its operations.
    """
    applies = _applies(task, min(len(jobs), _cores())) if x.device.type == "cpu" and len(jobs) > 1 else []
    if len(applies) < 2:
        with torch.enable_grad():
            return [job(task.apply) for job in jobs]
    free: queue.SimpleQueue[Apply] = queue.SimpleQueue()
    for apply in applies:
        free.put(apply)

    def do(job: Callable[[Apply], Out]) -> Out:
        apply = free.get()
        try:
            return job(apply)
        finally:
            free.put(apply)

    with ThreadPoolExecutor(len(applies), initializer=torch.set_num_threads, initargs=(1,)) as threads:
        return list(threads.map(do, jobs))


def _applies(task: Task, count: int) -> list[Apply]:
    """Return the task's ``apply`` and copies of it, ``count`` in all; none where it is small or not a module's."""
    owner = getattr(task.apply, "__self__", None)
    module = getattr(owner, "evaluator", None)
    if not isinstance(module, nn.Module) or getattr(owner, "draws", True):
        return []  # what draws at random does so in an order
    if sum(parameter.numel() for parameter in module.parameters()) < SMALL:
        return []
    known = _copies.setdefault(task, [])
    known += [copy.deepcopy(task.apply) for _ in range(count - 1 - len(known))]
    return [task.apply, *known[: count - 1]]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
