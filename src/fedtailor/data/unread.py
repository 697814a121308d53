"""Rows that are on disk and not here: a file for every client, which is read where the client is trained and nowhere else."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from fedtailor.data.split import Split
from fedtailor.errors import InvalidArgument, InvalidData

PARTS = ("train", "test", "val")
HEADERS = 4096  # bytes that the headers of a file's arrays may take, each
UNREADABLE = (KeyError, OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)
aten = torch.ops.aten
# they give rows that are not here either
CHOOSING = {aten.slice, aten.index, aten.select, aten.detach, aten.clone, aten._to_copy}


class Unread(Tensor):
    """A tensor of which only the form is known. Choosing some rows or another dtype gives another one; whatever else looks at
    the numbers is refused."""

    folder: str

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, folder: str) -> Unread:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        self.folder = folder
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket not in CHOOSING or not isinstance(args[0], Unread):
            raise next(leaf for leaf in _leaves(args) if isinstance(leaf, Unread)).refusal()
        forms = tree_map(lambda leaf: torch.empty_like(leaf, device="meta") if type(leaf) is Tensor else _form(leaf), args)
        options = {key: value for key, value in (kwargs or {}).items() if key != "device"}
        form = func(*forms, **options)
        return cls(tuple(form.shape), form.dtype, args[0].folder) if form.numel() else torch.empty(form.shape, dtype=form.dtype)

    def refusal(self) -> InvalidArgument:
        """Return the error for what needs the numbers."""
        return InvalidArgument(
            f"this needs clients' rows here, and those of {self.folder} are read by the nodes of a cluster alone; leave out what "
            f"needs them, or read them all: Federation.from_shards({self.folder!r})"
        )

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise self.refusal()

    __array__ = tolist = numpy

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Unread({tuple(self.shape)}, {self.dtype}, {self.folder!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Unread, (tuple(self.shape), self.dtype, self.folder)


def _form(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Unread) else leaf


def _leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, list | tuple) else [value]


@dataclass(frozen=True, eq=False)
class Shards:
    """The files of clients in a folder, in the order of the federation: their names and digests, and, where there are classes,
    the training rows of each, ``counts`` [clients, classes]."""

    folder: str
    clients: tuple[str, ...]
    files: tuple[str, ...]
    digests: tuple[str, ...]
    counts: NDArray[np.int64] | None

    def take(self, chosen: NDArray[np.int64]) -> Shards:
        """Return those of some clients."""
        clients, names, digests = (tuple(column[i] for i in chosen) for column in (self.clients, self.files, self.digests))
        return Shards(self.folder, clients, names, digests, None if self.counts is None else self.counts[chosen])

    @property
    def digest(self) -> str:
        """A checksum of all rows, made of the files' own."""
        return hashlib.sha256("\0".join(self.digests).encode()).hexdigest()

    def read(self, splits: Mapping[str, Split]) -> dict[str, Split]:
        """Return the splits with their rows, in the dtypes that they are to have; every file is read once, and checked."""
        out = {part: _room(split) for part, split in splits.items()}
        for place, client in enumerate(self.clients):
            arrays = self._arrays(place, sum(_size(split, place) for split in splits.values()))
            for part, split in out.items():
                rows = slice(int(split.offsets[place]), int(split.offsets[place + 1]))
                for field, block in (("x", split.x), ("y", split.y), ("weights", split.weights)):
                    if block is not None:
                        block[rows] = self._fitting(arrays, f"{part}_{field}", block[rows], client)
        return out

    def _arrays(self, place: int, room: int) -> dict[str, NDArray[Any]]:
        path, client = Path(self.folder) / self.files[place], self.clients[place]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InvalidData(
                f"{path} cannot be read ({error.strerror}), the rows of client {client}; every node needs the folder at this path"
            ) from error
        if hashlib.sha256(content).hexdigest() != self.digests[place]:
            raise InvalidData(
                f"{path}, the rows of client {client}, was changed or cut short (its checksum does not fit); restore it from a "
                "copy, or save the shards anew"
            )
        return unpacked(content, path, room)

    def _fitting(self, arrays: Mapping[str, NDArray[Any]], name: str, room: Tensor, client: str) -> Tensor:
        """Return an array of a client's file; one that is not as the index says is refused."""
        found = arrays.get(name)
        if found is None or found.shape != tuple(room.shape) or found.dtype.kind not in "biuf":
            shape = "no numbers" if found is None or found.dtype.kind not in "biuf" else f"shape {found.shape}"
            raise InvalidData(
                f"{name} of client {client} in {self.folder} has {shape} where the index says {tuple(room.shape)}; save the "
                "shards anew"
            )
        return torch.from_numpy(found)


def unpacked(content: bytes, path: Path, room: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file, which may hold ``room`` bytes of numbers."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
        if sum(member.file_size for member in members) > room + HEADERS * len(members):
            raise InvalidData(f"{path} holds more rows than its index says; save the shards anew")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except InvalidData:
        raise
    except UNREADABLE as error:
        raise InvalidData(f"{path} is no file of shards ({type(error).__name__}); save the shards anew") from error


def _room(split: Split) -> Split:
    """Return a split of the same form whose rows are to be filled in."""
    x, y = (torch.empty(each.shape, dtype=each.dtype) for each in (split.x, split.y))
    return replace(split, x=x, y=y, weights=None if split.weights is None else torch.empty(len(y), dtype=split.weights.dtype))


def _size(split: Split, place: int) -> int:
    """Return the bytes of a client's rows in the widest dtypes that a file may have."""
    each = sum(8 * int(np.prod(block.shape[1:])) for block in (split.x, split.y, split.weights) if block is not None)
    return int(split.sizes[place]) * each


def zeros(split: Split) -> Split:
    """Return a split of the same form that holds zeros, which take no memory."""
    blocks = {"x": split.x, "y": split.y, "weights": split.weights}
    flat = {name: None if b is None else torch.zeros((), dtype=b.dtype).expand(b.shape) for name, b in blocks.items()}
    return replace(split, **flat)  # type: ignore[arg-type]


def made_up(like: Tensor, count: int, values: int) -> Tensor:
    """Return rows of the form of ``like``: whole numbers below ``values``, or normal ones; the same every time."""
    draw, shape = torch.Generator().manual_seed(0), (count, *like.shape[1:])
    if values:
        return torch.randint(values, shape, generator=draw).to(like.dtype)
    return torch.randn(shape, generator=draw, dtype=like.dtype)
