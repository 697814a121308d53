"""Where tensors are computed: which devices there are, what each can do, and how trees come to be on one.

Everything that is particular to CUDA and MPS is in ``BACKENDS``, in this file. It was written without such a device at hand:
``make test-gpu`` tries it on one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.errors import InvalidArgument

CPU = torch.device("cpu")
AUTO = "auto"


@dataclass(frozen=True)
class Backend:
    """A kind of device: what it can do, and how it is asked."""

    count: Callable[[], int]  # of devices that are there
    free: Callable[[torch.device], int]  # bytes of memory that are not in use
    wait: Callable[[torch.device], None]  # until all that was asked for is computed
    generator: Callable[[torch.device], torch.Generator | None]  # where modules draw from
    title: Callable[[torch.device], str]
    gains: Callable[[torch.device], bool]  # whether bfloat16 is computed faster
    double: bool = True  # whether there is float64
    pins: bool = False  # whether it reads page-locked memory faster
    release: Callable[[], None] = lambda: None  # gives back memory that torch keeps for later


def _no_wait(device: torch.device) -> None:
    pass


def _mps_free(device: torch.device) -> int:
    return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())


def _cuda_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0]


BACKENDS: dict[str, Backend] = {
    "cuda": Backend(
        count=lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0,
        free=lambda device: torch.cuda.mem_get_info(device)[0],
        wait=torch.cuda.synchronize,
        generator=_cuda_generator,
        title=torch.cuda.get_device_name,
        gains=lambda device: torch.cuda.get_device_capability(device) >= (8, 0),
        pins=True,
        release=torch.cuda.empty_cache,
    ),
    "mps": Backend(
        count=lambda: int(torch.backends.mps.is_available()),
        free=_mps_free,
        wait=lambda device: torch.mps.synchronize(),
        generator=lambda device: torch.mps._get_default_mps_generator(),
        title=lambda device: "Apple GPU",
        gains=lambda device: False,
        double=False,
        release=lambda: torch.mps.empty_cache(),
    ),
    "cpu": Backend(
        count=lambda: 1,
        free=lambda device: 0,  # memory of the CPU is not rationed by us
        wait=_no_wait,
        generator=lambda device: torch.default_generator,
        title=lambda device: "CPU",
        gains=lambda device: False,
    ),
}


def backend(device: torch.device) -> Backend:
    return BACKENDS[device.type]


def is_full(error: BaseException) -> bool:
    """Return whether an error says that a device has no memory left (MPS and the CPU say it in words only)."""
    says_so = isinstance(error, RuntimeError) and any(words in str(error) for words in ("out of memory", "can't allocate memory"))
    return isinstance(error, torch.OutOfMemoryError) or says_so


def checked(name: str) -> str:
    """Return the name of a device as it was given; a ``ValueError`` says what it may be. It need not be there."""
    kind, colon, number = name.partition(":")
    if name == AUTO or (kind in BACKENDS and (not colon or (kind != "cpu" and re.fullmatch(r"\d+", number)))):
        return name
    raise ValueError("must be cpu, cuda, cuda:N, mps or auto")


def find(name: str, dtype: torch.dtype = torch.float32) -> torch.device:
    """Return the device of that name; ``auto`` is the first of CUDA, MPS and CPU that is there and has the precision."""
    if name == AUTO:
        fit = (kind for kind, known in BACKENDS.items() if known.count() and (known.double or dtype != torch.float64))
        name = next(fit)
    kind, _, number = name.partition(":")
    known = BACKENDS[kind]
    there, index = known.count(), int(number or 0)
    if index >= there:
        have = f"there is no {kind} device here" if not there else f"there are {there} {kind} devices here, numbered from 0"
        raise InvalidArgument(f"device={name!r}: {have}; use device='cpu', or auto")
    if dtype == torch.float64 and not known.double:
        raise InvalidArgument(f"device={name!r} has no float64; use dtype='float32', or device='cpu'")
    return CPU if kind == "cpu" else torch.device(kind, index)


def without_double() -> list[str]:
    """Return the kinds of devices that are here and have no float64."""
    return [kind for kind, known in BACKENDS.items() if not known.double and known.count()]


def widest(device: torch.device) -> torch.dtype:
    """Return the most precise type of numbers that a device has."""
    return torch.float64 if backend(device).double else torch.float32


def moved(branch: Any, device: torch.device) -> Any:
    """Return a tree on a device, in the precision it has there; leaves that are there already are not copied."""
    kind = widest(device)
    return tree.map(lambda leaf: leaf.to(device, kind) if leaf.dtype == torch.float64 else leaf.to(device), branch)


def in_double(values: Tensor) -> Tensor:
    """Return numbers in double precision: where they are, or on the CPU if the device has none."""
    return values.double() if backend(values.device).double else values.cpu().double()


def size(*tensors: Tensor | None) -> int:
    """Return the bytes of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
