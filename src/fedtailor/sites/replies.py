"""Replies: how messages reach sites, what comes back, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fedtailor.sites.site import EVALUATE, FINISH, TRAIN
from fedtailor.sites.wire import Parcel

Columns = dict[str, np.ndarray[Any, np.dtype[np.float64]]]


class Transport(Protocol):
    """Carries messages to sites and back."""

    @property
    def name(self) -> str: ...

    def ask(self, parcels: Mapping[str, Parcel], seconds: float) -> Mapping[str, Parcel | str]:
        """Return every client's reply, or, where there is none within ``seconds``, a word that says why."""


def bytes_of(reply: Parcel | str) -> int:
    """Return the bytes of a reply, of none where it did not come."""
    return 0 if isinstance(reply, str) else reply.size


def when(event: Mapping[str, Any], rounds: int) -> str:
    """Return in which round something went wrong, in words, which count from one."""
    return f"in round {event['round'] + 1}" if event["round"] < rounds else "after the last round"


def sentences(events: Sequence[Mapping[str, Any]], rounds: int) -> list[str]:
    """Return what went wrong, a sentence for each site."""
    by_client: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        by_client.setdefault(event["client"], []).append(event)
    return [
        f"{name}: {'once' if len(own) == 1 else f'{len(own)} times'} something went wrong, "
        f"last {when(own[-1], rounds)}: {own[-1]['what']}"
        for name, own in by_client.items()
    ]


def mismatch(asked: Mapping[str, Any], said: Mapping[str, Any]) -> str | None:
    """Return why a reply is not one to what was asked."""
    if said.get("error"):
        return f"could not answer: {said['error']}"
    for fact in ("client", "action", "run"):
        if said.get(fact) != asked[fact]:
            return f"answered with {fact} {said.get(fact)!r} in place of {asked[fact]!r}"
    numbers = {TRAIN: ("base", "version"), EVALUATE: ("base",), FINISH: ("base",)}.get(asked["action"], ())
    if not all(isinstance(said.get(key), int) and not isinstance(said.get(key), bool) for key in numbers):
        return "did not say which version of its state it has"
    return None


def answered(columns: Columns) -> Columns:
    """Return the columns of the sites that answered."""
    there = ~np.isnan(columns["rows"])
    return {name: values[there] for name, values in columns.items()}
