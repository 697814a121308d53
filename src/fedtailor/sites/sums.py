"""Sums: the server's half of a secure sum. It carries the sites' messages, and opens what they let it open: one sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedtailor.errors import InvalidData
from fedtailor.sites import masks
from fedtailor.sites.pact import Pact
from fedtailor.sites.secure import MASK, REVEAL, SHARE, pair_mask, promise, transcript
from fedtailor.sites.wire import Parcel

Shares = dict[str, dict[str, dict[int, bytes]]]
ASKED = 2  # times that a site is asked for its shares
Ask = Callable[[Mapping[str, Parcel]], Mapping[str, Parcel]]


@dataclass(frozen=True, eq=False)
class Exchange:
    """One exchange: ``head`` gives what every message to a site begins with, ``note`` takes what went wrong, and with whom."""

    pact: Pact
    agreed: str | None
    run: str
    about: list[Any]  # session, round, exchange, version
    ask: Ask
    head: Callable[[str, str], dict[str, Any]]
    note: Callable[[str, str], None]

    def total(self, trained: Mapping[str, Parcel], length: int) -> tuple[list[str], masks.Words] | None:
        """Return (whose uploads are in it, the sum), or None where too few sites were there to open one."""
        members = {name: keys for name, reply in sorted(trained.items()) if (keys := self._keys(name, reply)) is not None}
        needed = self.pact.needed(len(members))
        if len(members) < needed:
            return None
        about = transcript(self.agreed, self.run, self.about, self.pact, members)
        shared = self._say(SHARE, {name: {"members": members} for name in members})
        present = {name: reply.facts for name, reply in shared.items() if self._has_shares(name, reply, members)}
        if len(present) < needed:
            return None
        locked = {name: {"shares": {v: present[v]["shares"][name] for v in present if v != name}} for name in present}
        words = self._words(self._say(MASK, locked), length)
        there = sorted(words)
        if len(there) < needed:
            return None
        shares = self._shares(there, sorted(members), needed)
        if shares is None:
            return None
        try:
            return there, self._open(words, present, members, shares, about)
        except (InvalidData, ValueError) as error:
            self.note(", ".join(there), f"the sum cannot be opened: {error}")
            return None

    def _say(self, action: str, facts: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Parcel]:
        session = {"session": self.about[0]}
        return self.ask({name: Parcel({**self.head(action, name), **session, **more}, {}) for name, more in facts.items()})

    def _keys(self, name: str, reply: Parcel) -> dict[str, str] | None:
        keys = reply.facts.get("keys")
        if isinstance(keys, Mapping) and all(isinstance(keys.get(use), str) for use in ("lock", "mask", "signed")):
            return {use: keys[use] for use in ("lock", "mask", "signed")}
        self.note(name, "sent no keys for a secure sum")
        return None

    def _has_shares(self, name: str, reply: Parcel, members: Mapping[str, Any]) -> bool:
        shares = reply.facts.get("shares")
        if isinstance(shares, Mapping) and set(shares) == set(members) - {name}:
            texts = (reply.facts.get("promise"), *shares.values())
            if all(isinstance(text, str) for text in texts):
                return True
        self.note(name, "did not send a share to every site")
        return False

    def _words(self, replies: Mapping[str, Parcel], length: int) -> dict[str, masks.Words]:
        kind = {32: torch.int32, 64: torch.int64}[self.pact.bits]
        words = {}
        for name, reply in replies.items():
            leaf = reply.tree.get("masked") if isinstance(reply.tree, Mapping) else None
            if leaf is None or leaf.dtype != kind or tuple(leaf.shape) != (length,):
                self.note(name, f"upload refused: it is not {length} integers of {self.pact.bits} bits")
            else:
                words[name] = leaf.numpy().view(masks.WORDS[self.pact.bits])
        return words

    def _shares(self, there: list[str], order: list[str], needed: int) -> Shares | None:
        """Return the shares by kind, by whose secret they are of, by place; sites that do not answer are asked once more."""
        out: Shares = {"keys": {}, "seeds": {}}
        waiting = list(there)
        for _ in range(ASKED):
            for name, reply in self._say(REVEAL, {name: {"there": there} for name in waiting}).items():
                waiting.remove(name)
                for kind, owner, share in self._read_shares(name, reply):
                    out[kind].setdefault(owner, {})[order.index(name) + 1] = share
            if len(there) - len(waiting) >= needed:
                return out
        return None

    def _read_shares(self, name: str, reply: Parcel) -> list[tuple[str, str, bytes]]:
        try:
            texts = [(kind, owner, text) for kind in ("keys", "seeds") for owner, text in reply.facts[kind].items()]
            shares = [(kind, owner, bytes.fromhex(text)) for kind, owner, text in texts]
        except (KeyError, AttributeError, TypeError, ValueError):
            shares = []
        if not shares or any(len(share) != masks.SHARE for *_, share in shares):
            self.note(name, "sent shares that cannot be read")
            return []
        return shares

    def _open(
        self,
        words: Mapping[str, masks.Words],
        present: Mapping[str, Mapping[str, Any]],
        members: Mapping[str, Mapping[str, str]],
        shares: Shares,
        about: bytes,
    ) -> masks.Words:
        """Return the sum: take away every present site's own mask, and the masks that lost ones have in common with them."""
        needed, bits = self.pact.needed(len(members)), self.pact.bits
        total = np.sum(np.stack(list(words.values())), axis=0, dtype=masks.WORDS[bits])
        for name in words:
            seed = _joined(name, shares["seeds"].get(name, {}), needed)
            if promise(about, name, seed) != present[name]["promise"]:
                raise InvalidData(f"the shares of {name}'s seed do not fit what it promised")
            total -= masks.stream(seed, len(total), bits)
        for lost in sorted(set(present) - set(words)):
            private = _joined(lost, shares["keys"].get(lost, {}), needed)
            if masks.public_of(private).hex() != members[lost]["mask"]:
                raise InvalidData(f"the shares of {lost}'s key do not fit its public half")
            for name in words:  # what the lost one would have added for it, with which its own would have gone
                total += pair_mask(private, members, lost, name, about, len(total), bits)
        return total


def _joined(name: str, shares: Mapping[int, bytes], needed: int) -> bytes:
    if len(shares) < needed:
        raise InvalidData(f"{len(shares)} shares of what hides {name} came, and {needed} are needed")
    return masks.join(dict(sorted(shares.items())[:needed]))
