"""Shards: the personal trees of very many clients, a record of bytes each, in files that are mapped and not read.

Beside them is an index: the clients' names, whose record is where, and a digest of every block of the files. To find a client's
tree is to look up its name, to check the blocks that its record lies in (once), and to take the record apart.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as packed_tensors

from fedtailor import tree
from fedtailor.errors import BadRun
from fedtailor.runs import files
from fedtailor.runs.names import Names, packed_names
from fedtailor.runs.personal import Chunk

INDEX = "index.safetensors"
SHARD = 64 << 20  # bytes of records in a file
BLOCK = 1 << 16  # bytes that are checked at once
NOWHERE = -1  # the stack of a client that has no tree
Bytes = NDArray[np.uint8]


@dataclass
class _Stack:
    """Clients whose trees have the same shapes, in writing: ``form`` has (shape, dtype) for every leaf."""

    number: int
    form: Any
    size: int  # bytes of a record
    clients: list[NDArray[np.int64]] = field(default_factory=list)
    waiting: list[Bytes] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def each(self) -> int:
        """Return how many records a file holds."""
        return max(1, SHARD // max(1, self.size))


def write(folder: Path, names: Sequence[str], chunks: Iterable[Chunk], most: int) -> dict[str, Any]:
    """Write the trees of all chunks, and say what ``read`` needs; without any of them if they have more than ``most`` bytes."""
    stacks: dict[str, _Stack] = {}
    stack_of, row_of = np.full(len(names), NOWHERE, np.int32), np.zeros(len(names), np.int64)
    blocks: dict[str, Any] = {}
    written = 0
    for clients, branch in chunks:
        form = tree.map(lambda leaf: [list(leaf.shape[1:]), str(leaf.dtype).removeprefix("torch.")], branch)
        stack = stacks.setdefault(repr(form), _Stack(len(stacks), form, _size(form)))
        written += len(clients) * stack.size
        if written > most:
            for name in blocks:
                (folder / name).unlink()
            stacks, stack_of, blocks = {}, np.full(len(names), NOWHERE, np.int32), {}
            break
        stack_of[clients] = stack.number
        row_of[clients] = sum(map(len, stack.clients)) + np.arange(len(clients))
        stack.clients.append(clients)
        stack.waiting.append(_records(branch, len(clients)))
        while sum(map(len, stack.waiting)) >= stack.each and stack.size:
            _flush(folder, stack, blocks)
    for stack in stacks.values():
        if stack.size and stack.waiting and sum(map(len, stack.waiting)):
            _flush(folder, stack, blocks)
    index = {"names": packed_names(names), "stack": torch.from_numpy(stack_of), "row": torch.from_numpy(row_of), "blocks": blocks}
    data = tree.pack(index)
    files.write(folder / INDEX, data)
    facts = [{"form": s.form, "each": s.each, "clients": sum(map(len, s.clients)), "files": s.names} for s in stacks.values()]
    return {"index": hashlib.sha256(data).hexdigest(), "block": BLOCK, "stacks": facts}


def _flush(folder: Path, stack: _Stack, blocks: dict[str, Any]) -> None:
    """Write the first records that wait as one file."""
    records = np.concatenate(stack.waiting)
    stack.waiting = [records[stack.each :]]
    name = f"personal-{stack.number}-{len(stack.names):05d}.safetensors"
    data = packed_tensors({"records": torch.from_numpy(records[: stack.each])})
    digests = [hashlib.sha256(data[start : start + BLOCK]).digest() for start in range(0, len(data), BLOCK)]
    blocks[name] = torch.from_numpy(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32).copy())
    files.write(folder / name, data)
    stack.names.append(name)


def _size(form: Any) -> int:
    return sum(int(np.prod(shape)) * getattr(torch, dtype).itemsize for shape, dtype in tree.leaves(form))


def _records(branch: Any, count: int) -> Bytes:
    """Return stacked trees as bytes, [clients, bytes of a tree]."""
    leaves = [leaf.detach().contiguous().view(torch.uint8).reshape(count, -1).numpy() for leaf in map(_flat, tree.leaves(branch))]
    return np.concatenate(leaves, 1) if leaves else np.zeros((count, 0), np.uint8)


def _flat(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.reshape(len(leaf), -1)


@dataclass(frozen=True, eq=False)
class Shards(Mapping[str, Any]):
    """Every client's tree by name, taken out of the files in ``folder`` when asked for."""

    folder: Path
    index: Mapping[str, Any]
    facts: Mapping[str, Any]  # what ``write`` gave
    _open: dict[str, mmap.mmap] = field(default_factory=dict)
    _checked: set[tuple[str, int]] = field(default_factory=set)

    @cached_property
    def names(self) -> Names:
        return Names(self.index["names"])

    @cached_property
    def numbers(self) -> int:
        """Return how many numbers all trees hold."""
        stacks = self.facts["stacks"]
        return sum(s["clients"] * sum(int(np.prod(shape)) for shape, _ in tree.leaves(s["form"])) for s in stacks)

    def __getitem__(self, name: str) -> Any:
        client = self.names.find(name)
        if client is None or (number := int(self.index["stack"][client])) == NOWHERE:
            raise KeyError(name)
        stack = self.facts["stacks"][number]
        size = _size(stack["form"])
        file, row = divmod(int(self.index["row"][client]), stack["each"])
        record = self._record(stack["files"][file], row, size) if size else b""
        start = 0

        def leaf(form: Any) -> torch.Tensor:
            nonlocal start
            (shape, dtype), begin = form, start
            start += _size(form)
            if begin == start:
                return torch.zeros(shape, dtype=getattr(torch, dtype))
            return torch.frombuffer(bytearray(record[begin:start]), dtype=getattr(torch, dtype)).reshape(shape)

        return tree.map(leaf, stack["form"])

    def __iter__(self) -> Iterator[str]:
        stacks = self.index["stack"].numpy()
        return (name for name, stack in zip(self.names, stacks, strict=True) if stack != NOWHERE)

    def __len__(self) -> int:
        return int((self.index["stack"] != NOWHERE).sum())

    def __contains__(self, name: object) -> bool:
        client = self.names.find(name) if isinstance(name, str) else None
        return client is not None and int(self.index["stack"][client]) != NOWHERE

    def _record(self, name: str, row: int, size: int) -> bytes:
        """Return the bytes of a record, in blocks that are as they were written."""
        if name not in self._open:
            self._open[name] = files.mapped(self.folder / name)
        content, digests = self._open[name], self.index["blocks"][name]
        step = int(self.facts["block"])
        self._check(name, content, digests, 0, step)  # which says where the records begin
        start = int.from_bytes(content[:8], "little") + 8 + row * size
        for block in range(start // step, (start + size - 1) // step + 1):
            self._check(name, content, digests, block, step)
        return content[start : start + size]

    def _check(self, name: str, content: mmap.mmap, digests: torch.Tensor, block: int, step: int) -> None:
        if (name, block) in self._checked:
            return
        digest = hashlib.sha256(content[block * step : (block + 1) * step]).digest()
        if block >= len(digests) or digest != digests[block].numpy().tobytes():
            raise BadRun(f"{self.folder / name} was changed or cut short; restore it from a copy, or train anew")
        self._checked.add((name, block))
