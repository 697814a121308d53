"""What is sent to another process of ours as bytes: a plan, with the methods and modules of the user's own that it needs.

Secrets are not in the bytes; they go beside them, over a connection that nobody keeps. Nothing that comes from outside is read
in this way.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from fedtailor.algorithms import origin
from fedtailor.algorithms.base import Algorithm
from fedtailor.data.secret import Secret
from fedtailor.errors import InvalidArgument

SECRET, TENSOR = "secret", "tensor"
Secrets = list[tuple[str, bool]]
Aside = Callable[[Tensor], Any]  # says where a tensor was put, or None where it is to be sent in the bytes


def _nothing_aside(tensor: Tensor) -> Any:
    return None


def dumps(thing: Any, method: type[Algorithm] | None = None, aside: Aside = _nothing_aside) -> tuple[bytes, Secrets]:
    """Return a thing as bytes, and its secrets, which are not in them; what cannot be sent is refused by name."""
    import cloudpickle

    secrets: Secrets = []

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, part: Any) -> Any:
            if isinstance(part, Secret):
                secrets.append((part.hex(), part.known))
                return SECRET, len(secrets) - 1
            place = aside(part) if type(part) is Tensor else None
            return None if place is None else (TENSOR, place)

    modules = [sys.modules[name] for name in _own_modules(method)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        buffer = io.BytesIO()
        Pickler(buffer).dump([module.__name__ for module in modules])
        Pickler(buffer).dump(thing)
    except Exception as error:  # whatever the user's objects do when they are copied
        first = (str(error).strip().splitlines() or [""])[0]
        raise InvalidArgument(f"this cannot be sent to another process ({type(error).__name__}: {first})") from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue(), secrets


def loads(content: bytes, secrets: Sequence[tuple[str, bool]], fetch: Callable[[Any], Tensor] | None = None) -> Any:
    """Return what was sent; ``fetch`` gives the tensors that were put aside."""
    import pickle

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, which: tuple[str, Any]) -> Any:
            kind, place = which
            if kind == TENSOR and fetch is not None:
                return fetch(place)
            key, known = secrets[place]
            return Secret(bytes.fromhex(key), known)

    buffer = io.BytesIO(content)
    for name in Unpickler(buffer).load():
        sys.modules.setdefault(name, ModuleType(name))  # a dataclass looks its module up by name
    return Unpickler(buffer).load()


def _own_modules(method: type[Algorithm] | None) -> list[str]:
    """Return the modules of the user's own, which no other process may have: those loaded from files, and the method's."""
    loaded = {str(path) for path in origin.files_loaded()}
    names = [name for name, module in list(sys.modules.items()) if getattr(module, "__file__", None) in loaded]
    kinds = () if method is None else method.__mro__
    names += [each.__module__ for each in kinds if issubclass(each, Algorithm) and origin.of(each) is not None]
    return sorted({name for name in names if name in sys.modules and name != "__main__"})  # cloudpickle takes that one along
