"""Processes of our own, on every operating system: how they are started, and what they are doing.

No process is ever forked off this one, which may have threads. On Linux a server is started once, of one thread and with
everything imported, and workers are forked off *that*; elsewhere every worker is started anew (``spawn``). Neither imports the
user's script again.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

LINUX = sys.platform.startswith("linux")
START = "forkserver" if LINUX else "spawn"  # how workers are started; tests try the other one too
PRELOADED = ["fedtailor.engine.loop", "fedtailor.engine.worker", "cloudpickle"]
LEAST = 0.2  # seconds of work in a round from which it pays to hand it out
START_UP = 3.0  # seconds until the first workers have imported everything
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
PARENTS = (signal.SIGINT, signal.SIGTERM)  # the signals that are the parent's to handle: they reach a whole process group

_owner: int | None = None  # the process that started the server: a fork of it, made by somebody else, has none


def cores() -> int:
    """Return how many cores this process may use (1 where it may not start processes)."""
    if multiprocessing.current_process().daemon:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pays(here: float, in_all: float) -> bool:
    """Return whether workers pay where so many seconds of work are left, in this round and in all, if one process does them."""
    saved = in_all * (1 - 1 / cores())
    server_is_there = _owner == os.getpid() and START == "forkserver"
    return here > LEAST and saved > (0.0 if server_is_there else START_UP)


def _method() -> str:
    return START if _owner in (None, os.getpid()) else "spawn"


def context() -> BaseContext:
    """Return how processes are started here."""
    found = multiprocessing.get_context(_method())
    if _method() == "forkserver":
        found.set_forkserver_preload(PRELOADED)
    return found


def start(process: BaseProcess) -> None:
    """Start a process of ours; the signals that are its parent's are held back until it ignores them."""
    global _owner
    if os.name == "posix":
        resource_tracker.ensure_running()  # it would lift the mask
    with _masked(), _without_main(), _environment():
        if _method() == "forkserver":
            forkserver.ensure_running()
            _owner = os.getpid()
        process.start()


def leave_signals_to_the_parent() -> None:
    """Ignore, in a process of ours, what its parent handles."""
    for number in PARENTS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS)


@contextmanager
def _masked() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the user's script, which a new process would otherwise run again to find what is defined there."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _environment() -> Iterator[None]:
    """Let a process start with libraries of one thread (it does not need more, and a server of forks must not have them), and
    import nothing from the folder that one happens to be in."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def activity(pid: int) -> tuple[bool, tuple[str, ...]]:
    """Return whether a signal has stopped a process, and its CPU time so far; () where it cannot be told or has just died."""
    try:
        if LINUX:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return state in "Tt", tuple(fields[10:12])
        return (False, _windows_times(pid)) if sys.platform == "win32" else by_ps(pid)
    except (OSError, ValueError, subprocess.SubprocessError):
        return False, ()


def by_ps(pid: int) -> tuple[bool, tuple[str, ...]]:
    """Return what ``activity`` does, as every Unix can say it."""
    command = ["ps", "-o", "stat=", "-o", "time=", "-p", str(pid)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    return said[0].startswith("T"), tuple(said[1:])


def _windows_times(pid: int) -> tuple[str, ...]:
    """Return a process's seconds in kernel and user mode, in units of 100 ns."""
    kernel: Any = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(kernel.OpenProcess(0x1000, False, pid))  # PROCESS_QUERY_LIMITED_INFORMATION
    times = [ctypes.c_uint64() for _ in range(4)]  # created, ended, kernel, user
    try:
        good = kernel.GetProcessTimes(handle, *(ctypes.byref(each) for each in times))
    finally:
        kernel.CloseHandle(handle)
    return tuple(str(each.value) for each in times[2:]) if good else ()


def keep_memory() -> None:
    """Tell glibc to keep freed blocks: a large network otherwise spends a tenth of its time on fresh pages."""
    if not LINUX:
        return
    with suppress(OSError, AttributeError):  # another libc
        libc = ctypes.CDLL(None)
        trim, top_pad, map_from = -1, -2, -3  # mallopt's names for them, malloc.h
        for option, value in ((trim, 2**31 - 1), (top_pad, 2**26), (map_from, 2**30)):
            libc.mallopt(option, value)
