"""Different networks by name: ``mixed:mlp:8=ann,cid+mlp:64`` gives ann and cid one with 8 hidden units, all others one with 64.

Every body ends in ``WIDTH`` features, and heads are linear and of the same form, so that methods that go by features can be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fedtailor.errors import InvalidArgument
from fedtailor.models import build
from fedtailor.models.mixed import Mixed

START = "mixed:"
WIDTH = 32  # features that every body gives
EXAMPLE = f"{START}mlp:8=ann,bob+mlp:64"


def is_several(model: object) -> bool:
    """Return whether a model is the name of several networks."""
    return isinstance(model, str) and model.startswith(START)


def several(name: str, shape: tuple[int, ...], outputs: int, clients: Sequence[str], seed: int = 0) -> Mixed:
    """Return the networks that ``name`` gives to these clients; the seed fixes the start."""
    of = owners(name, clients)
    bodies: Mapping[str, nn.Module] = {
        str(number): build(network, shape, WIDTH, seed=seed) for number, network in enumerate(_read(name))
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.Linear(WIDTH, outputs)
    return Mixed(bodies, of, head)


def _read(name: str) -> dict[str, list[str] | None]:
    """Return the clients by network; None: all that are not named."""
    out: dict[str, list[str] | None] = {}
    for entry in name.removeprefix(START).split("+"):
        network, equals, whose = entry.strip().partition("=")
        named = [client.strip() for client in whose.split(",") if client.strip()]
        if not network or network in out or (equals and not named):
            raise InvalidArgument(f"cannot read the model {name!r}; write networks and whose they are, as in {EXAMPLE}")
        out[network] = named if equals else None
    if len(out) < 2 or list(out.values()).count(None) > 1:
        raise InvalidArgument(f"the model {name!r} must name two networks or more, at most one of them for all others: {EXAMPLE}")
    return out


def owners(name: str, clients: Sequence[str]) -> dict[str, str]:
    """Return by client which body it has."""
    of: dict[str, str] = {}
    rest: str | None = None
    for number, (network, named) in enumerate(_read(name).items()):
        if named is None:
            rest = str(number)
        for client in named or ():
            if client not in clients:
                raise InvalidArgument(f"the model {name!r} gives {network} to {client}, and there is no such client")
            if client in of:
                raise InvalidArgument(f"the model {name!r} gives {client} two networks; name it once")
            of[client] = str(number)
    lacking = [client for client in clients if client not in of]
    if lacking and rest is None:
        raise InvalidArgument(f"the model {name!r} gives {lacking[0]} no network; end it with +NETWORK for all others")
    return {client: of.get(client, rest or "") for client in clients}
