"""A device that is not there: tensors on ``pretend:0`` hold their numbers on the CPU and behave as those of a GPU do.

An operation on tensors of two devices is refused, what brings a number back to Python is counted (``waits``), and double
precision can be taken away (as on MPS). Since the arithmetic is the CPU's, a run there must end with the CPU's bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fedtailor.engine import vectorized
from fedtailor.task.device import BACKENDS, Backend

NAME = "pretend"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
waits: Counter[str] = Counter()  # operations after which Python waits for the device, by name
memory = 8 * vectorized.MEMORY  # bytes that are free: chunks of clients are then as large as on the CPU

COPIES = ("aten::_to_copy", "aten::copy_")
WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique", "aten::unique")


class Mixed(RuntimeError):
    """Tensors of two devices met in one operation."""


class OnDevice(Tensor):
    """A tensor of the device; ``numbers`` is where they really are."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> OnDevice:
        if numbers.dtype == torch.float64 and not BACKENDS[NAME].double:
            raise TypeError("the device has no float64")
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
        )
        self.numbers = numbers
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        waits["tolist"] += 1
        return self.numbers.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.numbers})"


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, tensors = func.name(), list(_tensors((*args, *kwargs.values())))
    _check(func, name, args, tensors)
    to = kwargs.get("device")
    leaves = to is not None and torch.device(to).type != NAME
    if name.startswith(WAITING) or leaves or (name.startswith("aten::copy_") and not isinstance(args[0], OnDevice)):
        waits[name] += 1
    inner = {key: _map(_numbers, value) for key, value in kwargs.items()}
    if to is not None:
        inner["device"] = torch.device("cpu")
    out = func(*_map(_numbers, args), **inner)
    if torch.Tag.inplace_view in func.tags:  # it gives a tensor another shape: outside as well
        with no_dispatch():
            func(*args, **kwargs)
    for tensor in tensors:
        assert tensor.shape == _numbers(tensor).shape, f"{name} changed a size behind the tensor's back"
    same = {id(_numbers(tensor)): tensor for tensor in tensors}  # what is written in place stays the tensor it was

    def outside(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return same[id(value)] if id(value) in same else value if leaves else OnDevice(value)

    return _map(outside, out)


def _map(function: Any, value: Any) -> Any:
    """Apply a function inside lists and tuples."""
    return type(value)([_map(function, v) for v in value]) if type(value) in (list, tuple) else function(value)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)


def _numbers(value: Any) -> Any:
    return value.numbers if isinstance(value, OnDevice) else value


def _check(func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
    """Refuse what CUDA refuses: a single number, and the indices of a tensor of the device, may be on the CPU."""
    if name.startswith(COPIES):
        return
    strangers = [tensor for tensor in tensors if not isinstance(tensor, OnDevice)]
    if name.startswith(("aten::index.", "aten::index_put", "aten::_unsafe_index.")) and isinstance(args[0], OnDevice):
        indices = {id(index) for index in args[1]}
        strangers = [tensor for tensor in strangers if id(tensor) not in indices]
        if any(isinstance(index, OnDevice) and index.dtype == torch.bool for index in args[1]):
            waits[name] += 1
    if torch.Tag.pointwise in func.tags:
        written = args[0] if func._schema.is_mutable and args else None
        strangers = [tensor for tensor in strangers if tensor.dim() or tensor is written]
    if strangers:
        raise Mixed(f"{name}: a tensor of shape {tuple(strangers[0].shape)} is on the CPU and another on {DEVICE}")


def _empty(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, **more: Any
) -> Tensor:
    return OnDevice(torch.empty(size, dtype=dtype, memory_format=more.get("memory_format") or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _sized(name: str) -> Any:
    """A kernel that makes a tensor on the CPU: what torch does by itself changes the size of an empty one."""
    function = getattr(torch.ops.aten, name.partition(".")[0])
    overload = getattr(function, name.partition(".")[2] or "default")

    def make(*args: Any, device: Any = None, **more: Any) -> Tensor:
        return OnDevice(overload(*args, device=torch.device("cpu"), **more))

    return make


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _numbers(target).copy_(_numbers(source))
    return target


_kernels = torch.library.Library("aten", "IMPL")
_kernels.impl("empty.memory_format", _empty, "PrivateUse1")
_kernels.impl("empty_strided", _empty_strided, "PrivateUse1")
for _name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m"):
    _kernels.impl(_name, _sized(_name), "PrivateUse1")
_kernels.impl("_copy_from", _copy_from, "PrivateUse1")


def backend(double: bool = True, memory: int = memory, gains: bool = False) -> Backend:
    """Return what the device says of itself."""
    return Backend(
        count=lambda: 1,
        free=lambda device: memory,
        wait=lambda device: waits.update(["wait"]),
        generator=lambda device: None,
        title=lambda device: "not there",
        gains=lambda device: gains,
        double=double,
    )


BACKENDS[NAME] = backend()
