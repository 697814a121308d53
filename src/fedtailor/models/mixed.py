"""Clients with different networks behind one module: each client has a body of its own choice, and a head of the same form.

Every row says, in a part of its own that a run adds, which body it goes through (``engine/mixed.py``). A client trains its body
and its head; the others, of which it keeps the start, get no gradient. Only methods that leave models at home can be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch

from fedtailor.errors import InvalidArgument


class Mixed(nn.Module):
    """``bodies`` are the networks by name, ``of`` says whose is which (clients by name). ``head`` takes what any body gives; a
    method that goes by features (FedProto) needs it, and bodies that give equally many. Without it, bodies give the outputs."""

    def __init__(self, bodies: Mapping[str, nn.Module], of: Mapping[str, str], head: nn.Module | None = None) -> None:
        super().__init__()
        if not bodies or not all(isinstance(body, nn.Module) for body in bodies.values()):
            raise InvalidArgument("Mixed: give the bodies by name, as {'small': nn.Linear(8, 4), 'large': ...}")
        for client, name in of.items():
            if name not in bodies:
                raise InvalidArgument(f"Mixed: client {client} is to have {name!r}, and the bodies are {', '.join(bodies)}")
        self.bodies = nn.ModuleDict(dict(bodies))
        self.of = dict(of)
        self.head = nn.Identity() if head is None else head

    def number_of(self, client: str) -> int:
        """Return which body a client has, counted from 0."""
        if client not in self.of:
            raise InvalidArgument(f"Mixed: of= does not say which body client {client} has; name one of {', '.join(self.bodies)}")
        return list(self.bodies).index(self.of[client])

    def forward(self, architecture: Tensor, **parts: Tensor) -> Tensor:
        rows: tuple[Any, ...] = (parts.pop("x"),) if list(parts) == ["x"] else ()
        bodies = list(self.bodies.values())
        if _functorch.maybe_current_level() is None:  # one client: no other body is computed
            only = architecture.unique()
            if len(only) == 1:
                return self.head(bodies[int(only)](*rows, **parts))
        out: Tensor | None = None
        for number, body in enumerate(bodies):
            one = body(*rows, **parts)
            chosen = (architecture == number).view(-1, *[1] * (one.dim() - 1))
            if out is not None and out.shape[1:] != one.shape[1:]:
                raise ValueError(
                    f"the bodies give {tuple(out.shape[1:])} and {tuple(one.shape[1:])} per row; let all give the same"
                )
            out = torch.where(chosen, one, torch.zeros_like(one) if out is None else out)
        assert out is not None
        return self.head(out)


def as_own(rows: Tensor, data: Any) -> Tensor:
    """Return rows that belong to nobody (public ones) as rows of a client: through the body that its own rows go through."""
    kind = data["x"].flatten(0, 1)[0, -1]
    return torch.cat([rows[:, :-1], kind.expand(len(rows), 1)], 1)
