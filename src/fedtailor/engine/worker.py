"""The inside of a worker process: one thread, given one client at a time."""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedtailor.engine import parcel, processes
from fedtailor.engine.memory import Memory
from fedtailor.errors import FedtailorError, InvalidArgument

Habits = tuple[torch.dtype, int, str]  # what torch was told in the parent and numbers depend on


def habits() -> Habits:
    """Return what a worker must tell torch to compute what this process would."""
    return torch.get_default_dtype(), torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()


def serve(pipe: Connection, given: Memory, common: Memory, down: Memory, up: Memory) -> None:
    """Load what all jobs need, then do jobs until the parent closes its end of the pipe, or dies."""
    processes.leave_signals_to_the_parent()
    torch.set_num_threads(1)
    processes.keep_memory()
    given.keep_writes()  # a module may write to its buffers
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            content, secrets, told = pipe.recv()
            _adopt(told)
            context = parcel.loads(content, secrets, given.view)
        except EOFError:
            raise
        except Exception as error:  # whatever the user's modules do when they are imported here
            said = f"a worker process cannot load what it was sent ({_first_line(error)}); use workers=1"
            pipe.send((False, InvalidArgument(said)))
            return
        pipe.send((True, None))
        _work(context, pipe, common, down, up)


def _work(context: Any, pipe: Connection, common: Memory, down: Memory, up: Memory) -> None:
    shared: Any = None
    while True:
        kind, message = pipe.recv()
        if kind == "shared":
            shared = common.read(message, copy=False)
            continue
        function, client, arguments = down.read(message, copy=False)
        try:
            _say(pipe, (True, up.write(function(context, shared, client, *arguments))))
        except FedtailorError as error:
            _say(pipe, (False, error))
        except Exception as error:
            pipe.send((False, error_of(error, f"client {client}")))


def error_of(error: Exception, where: str) -> RuntimeError:
    """Return an error as one that every process can read."""
    return RuntimeError(f"{_first_line(error)} (in a worker process, {where})\n{''.join(traceback.format_exception(error))}")


def _first_line(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def _adopt(told: Habits) -> None:
    dtype, deterministic, precision = told
    torch.set_default_dtype(dtype)
    torch.set_deterministic_debug_mode(deterministic)
    torch.set_float32_matmul_precision(precision)


def _say(pipe: Connection, message: Any) -> None:
    try:
        pipe.send(message)
    except (pickle.PicklingError, AttributeError, TypeError):  # it has a class of the user's own, which no module has here
        import cloudpickle

        pipe.send_bytes(cloudpickle.dumps(message))  # the parent knows the class by the number it was sent with
