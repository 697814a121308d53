"""A network from a function of the user's own, which may ask for the shape of rows, the number of outputs, the seed
and the names of the clients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fedtailor.errors import FedtailorError, InvalidArgument

KNOWN = ("shape", "outputs", "seed", "clients")


def made_by(
    factory: Callable[..., Any], name: str, shape: Any, outputs: int, seed: int, clients: Sequence[str] = ()
) -> nn.Module:
    """Return the module that ``factory`` makes, with torch's generator started from the seed; outside it goes on as it was."""
    arguments = _arguments(factory, name, {"shape": shape, "outputs": outputs, "seed": seed, "clients": tuple(clients)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = factory(**arguments)
        except FedtailorError:
            raise
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InvalidArgument(
                f"the model {name} cannot be made ({type(error).__name__}: {text}); try it in Python"
            ) from error
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"the model {name} gives a {type(module).__name__}; let it return a torch.nn.Module")
    return module


def _arguments(factory: Callable[..., Any], name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return those of the values that a factory asks for by name."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # written in C
        return {}
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in KNOWN:
            raise InvalidArgument(
                f"the model {name} asks for {parameter.name!r}, and a run knows {', '.join(KNOWN)}; give it a default"
            )
    return {p.name: values[p.name] for p in named if p.name in KNOWN and p.kind is not p.POSITIONAL_ONLY}
