"""Rows of several parts (text and its mask, an image and a table) as one tensor, and back where a module takes them.

A row is the numbers of its parts, one part after another. Engines, batches, privacy and files see one tensor; a module gets the
parts: those of a dict by name where its forward names them (``forward(self, ids, mask)``), otherwise as one dict; those of a
tuple in order where its forward takes so many, otherwise as one tuple.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedtailor.errors import InvalidData

LARGEST = 2**24  # whole numbers up to here are floats without loss
TYPES = {"float": None, "int": torch.int64, "bool": torch.bool}
ARCHITECTURE = "architecture"  # the part of a row that says which network its client has (``models/mixed.py``)
Call = Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]


class Part(NamedTuple):
    """One part of a row; ``type`` is float, int or bool."""

    name: str
    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True)
class Packing:
    """Which parts a row has, and in which order; ``named``: they come as a dict, otherwise as a tuple; ``bare``: the user gave
    one array, and a run added the network of the row's client."""

    parts: tuple[Part, ...]
    named: bool
    bare: bool = False

    @staticmethod
    def of(value: Any, where: str) -> Packing:
        """Return how rows like these are packed: ``value`` is a dict or a tuple of arrays [rows, ...]."""
        if not value:
            raise InvalidData(f"{where} has no parts; give at least one array")
        if isinstance(value, Mapping) and not all(isinstance(name, str) for name in value):
            raise InvalidData(f"{where} has parts whose names are no words; name them, as {{'image': ..., 'table': ...}}")
        parts = []
        for name, part in _by_name(value).items():
            rows = _tensor(part, f"{name} of {where}")
            kind = "bool" if rows.dtype is torch.bool else "float" if rows.is_floating_point() else "int"
            parts.append(Part(name, tuple(rows.shape[1:]), kind))
        return Packing(tuple(parts), isinstance(value, Mapping))

    @property
    def mixed(self) -> bool:
        """Return whether rows say which network their client has."""
        return self.parts[-1].name == ARCHITECTURE

    @property
    def _seems_bare(self) -> bool:
        """Return whether the parts are those of one array; a dict with the one part x has the same."""
        return self.mixed and [part.name for part in self.parts[:-1]] == ["x"]

    @property
    def words(self) -> str:
        return ", ".join(part.name for part in self.parts)

    @property
    def shapes(self) -> Any:
        """The shapes of the parts, as a dict or a tuple."""
        return {p.name: p.shape for p in self.parts} if self.named else tuple(p.shape for p in self.parts)

    @property
    def given(self) -> Any:
        """The shapes of rows as the user gave them: without the part that a run adds where networks differ."""
        parts = self.parts[:-1] if self.mixed else self.parts
        return parts[0].shape if self.bare else Packing(parts, self.named).shapes

    @cached_property
    def sizes(self) -> list[int]:
        return [math.prod(part.shape) for part in self.parts]

    def with_architecture(self, x: Any, number: int) -> Any:
        """Return rows whose last part says that their client has this network, unless they say which."""
        if not self.mixed or (isinstance(x, Mapping) and ARCHITECTURE in x):
            return x
        parts = dict(x) if isinstance(x, Mapping) else {self.parts[0].name: x}
        return {**parts, ARCHITECTURE: np.full(len(next(iter(parts.values()))), number)}

    def pack(self, value: Any, where: str = "x") -> Tensor:
        """Return rows as one tensor [rows, numbers]; what has other parts, shapes or types is refused."""
        if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 2 and value.shape[1] == sum(self.sizes):
            return torch.as_tensor(value)  # packed already
        if not isinstance(value, (Mapping, tuple)) or list(_by_name(value)) != [part.name for part in self.parts]:
            kind = "dict" if self.named else "tuple"
            raise InvalidData(f"{where} must be a {kind} of the parts {self.words}, in this order, as the others are")
        flat = [
            self._flat(part, _tensor(rows, f"{part.name} of {where}"), where)
            for part, rows in zip(self.parts, _by_name(value).values(), strict=True)
        ]
        if len({len(rows) for rows in flat}) > 1:
            raise InvalidData(f"the parts of {where} have {', '.join(str(len(rows)) for rows in flat)} rows; give each as many")
        wide = torch.float64 if any(rows.dtype is torch.float64 for rows in flat) else torch.float32
        return torch.cat([rows.to(wide) for rows in flat], 1)

    @staticmethod
    def _flat(part: Part, rows: Tensor, where: str) -> Tensor:
        if tuple(rows.shape[1:]) != part.shape:
            raise InvalidData(f"{part.name} of {where} has rows of shape {tuple(rows.shape[1:])}, the others have {part.shape}")
        if part.type != "float" and rows.is_floating_point():
            raise InvalidData(f"{part.name} of {where} holds {rows.dtype}, the others whole numbers; convert it")
        if not rows.is_floating_point() and rows.numel() and int(rows.to(torch.int64).abs().max()) > LARGEST:
            raise InvalidData(f"{part.name} of {where} has a number above {LARGEST}; number what it counts from 0")
        return rows.reshape(len(rows), -1)

    def unpack(self, x: Tensor) -> Any:
        """Return the parts of rows [rows, numbers]."""
        out: dict[str, Tensor] = {}
        for part, rows in zip(self.parts, x.split(self.sizes, 1), strict=True):
            shaped, kind = rows.reshape(x.shape[0], *part.shape), TYPES[part.type]
            out[part.name] = shaped if kind is None else shaped.to(kind)
        return out if self.named else tuple(out.values())

    def call_of(self, module: nn.Module) -> Call:
        """Return how rows become the arguments of a module's forward."""
        names = [part.name for part in self.parts]
        signature = inspect.signature(module.forward)
        try:
            signature.bind(**dict.fromkeys(names)) if self.named else signature.bind(*names)
        except TypeError:  # it takes them all at once
            return lambda x: ((self.unpack(x),), {})
        return (lambda x: ((), self.unpack(x))) if self.named else (lambda x: (self.unpack(x), {}))

    def to_json(self) -> dict[str, Any]:
        parts = [[p.name, list(p.shape), p.type] for p in self.parts]
        return {"named": self.named, "parts": parts, **({} if self.bare == self._seems_bare else {"bare": self.bare})}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Packing:
        parts = tuple(Part(str(name), tuple(map(int, shape)), str(kind)) for name, shape, kind in data["parts"])
        packing = Packing(parts, bool(data["named"]))
        return replace(packing, bare=bool(data.get("bare", packing._seems_bare)))


def is_packable(x: Any) -> bool:
    """Return whether rows come in parts."""
    return isinstance(x, (Mapping, tuple))


def _by_name(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {str(i): part for i, part in enumerate(value)}


def _tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        rows = value.detach().cpu()
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise InvalidData(f"{where} has rows of different lengths; give every row the same number of features") from error
        if array.dtype.kind not in "biuf":
            raise InvalidData(f"{where} holds {array.dtype} values; give numbers (encode categories as 0, 1, 2, ...)")
        rows = torch.from_numpy(np.ascontiguousarray(array.astype(np.int64) if array.dtype.kind == "u" else array))
    if rows.dim() == 0 or rows.is_complex():
        raise InvalidData(f"{where} has shape {tuple(rows.shape)} and type {rows.dtype}; give numbers, a row for every example")
    return rows
