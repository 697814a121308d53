"""Memory that two processes share: a file that nobody else sees, mapped by both."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

ALIGN = 64


@dataclass(frozen=True)
class Place:
    """A tensor in shared memory."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        count = int(torch.Size(self.shape).numel())
        return self.start + -(-count * self.dtype.itemsize // ALIGN) * ALIGN


class Memory:
    """Memory that one side writes and the other reads; it grows as needed, and is given to a process when that is started."""

    def __init__(self, file: int | None = None, path: str | None = None) -> None:
        if file is None:
            file, path = _nameless()
        self._file, self._path, self._access = file, path, mmap.ACCESS_WRITE
        self._map: mmap.mmap | None = None

    def __reduce__(self) -> Any:
        if self._path is not None:
            return _opened, (self._path,)
        return _inherited, (reduction.DupFd(self._file),)

    def _reach(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size, access=self._access)
        return self._map

    def keep_writes(self) -> None:
        """Let nobody else see what is written here from now on; to be called before anything is read."""
        self._access = mmap.ACCESS_COPY

    def put(self, tensor: Tensor, start: int) -> Place:
        """Write a tensor from a place on, and return the place."""
        where = Place(start, tuple(tensor.shape), tensor.dtype)
        if tensor.numel():
            self._view(self._reach(where.end), where).copy_(tensor.detach())
        return where

    def view(self, where: Place) -> Tensor:
        """Return the tensor at a place, which is the memory itself."""
        if 0 in where.shape:
            return torch.empty(where.shape, dtype=where.dtype)
        return self._view(self._reach(where.end), where)

    def write(self, value: Any) -> tuple[Any, int]:
        """Return (``value`` with its tensors replaced by their places, bytes used)."""
        tensors: list[tuple[Tensor, Place]] = []
        used = 0

        def place(leaf: Any) -> Any:
            nonlocal used
            if not isinstance(leaf, Tensor):
                return leaf
            tensors.append((leaf, Place(used, tuple(leaf.shape), leaf.dtype)))
            used = tensors[-1][1].end
            return tensors[-1][1]

        placed = _convert(value, place)
        if used:
            self._reach(used)
        for tensor, where in tensors:
            self.put(tensor, where.start)
        return placed, used

    def read(self, message: tuple[Any, int], copy: bool) -> Any:
        """Return the value written; without ``copy`` its tensors are the memory itself, good until the next write."""
        placed, used = message
        if used:
            self._reach(used)

        def fetch(leaf: Any) -> Any:
            if not isinstance(leaf, Place):
                return leaf
            return self.view(leaf).clone() if copy else self.view(leaf)

        return _convert(placed, fetch)

    @staticmethod
    def _view(memory: mmap.mmap, where: Place) -> Tensor:
        count = int(torch.Size(where.shape).numel())
        return torch.frombuffer(memory, dtype=where.dtype, count=count, offset=where.start).view(where.shape)

    def close(self) -> None:
        self._map = None
        os.close(self._file)
        if self._path is not None:
            with suppress(OSError):  # a process that has the file open is at its end
                os.rmdir(os.path.dirname(self._path))


def _nameless() -> tuple[int, str | None]:
    """Return a file without a name, or with a path where files need one (Windows), which goes with the last who has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedtailor"), None
    if sys.platform != "win32":
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno()), None
    path = os.path.join(tempfile.mkdtemp(prefix="fedtailor-"), "memory")
    return os.open(path, os.O_RDWR | os.O_BINARY | os.O_CREAT | os.O_EXCL | os.O_TEMPORARY, 0o600), path


def _opened(path: str) -> Memory:
    flags = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_TEMPORARY", 0)
    return Memory(os.open(path, flags), path)


def _inherited(file: Any) -> Memory:
    return Memory(file.detach())


def _convert(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {k: _convert(v, leaf) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_convert(v, leaf) for v in value)
    if is_dataclass(value) and not isinstance(value, (type, Place)):
        return replace(value, **{f.name: _convert(getattr(value, f.name), leaf) for f in fields(value)})
    return leaf(value)
