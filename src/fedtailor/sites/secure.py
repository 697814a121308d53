"""A site's seat in secure sums: what it says in each of the four steps of an exchange, and what it refuses.

1. ``enter``: it has trained; its upload stays on its disk, and two public keys leave, signed with its own key.
2. ``share``: it splits a private key and a seed among all members, so that enough of them can stand in for one that is lost.
3. ``mask``: its upload leaves under masks, which cancel in the sum over all members, and one of its own.
4. ``reveal``: of members that are there it gives its share of the seed, of others that of the key, and of nobody both.

A step is taken once, with one answer. Whatever the server says differently to two sites (who is a member, with which keys, under
which terms) makes their masks differ, and the sum noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedtailor.errors import InvalidData
from fedtailor.runs import files
from fedtailor.sites import masks
from fedtailor.sites.memory import Memory
from fedtailor.sites.pact import Pact
from fedtailor.sites.wire import Parcel

SHARE, MASK, REVEAL = "share", "mask", "reveal"
STEPS = (SHARE, MASK, REVEAL)
OPENED = "opened.json"  # how many sums of each exchange this site has helped to open
SUMS = "sums"  # the folder of what a site keeps for them
ONLY = 0  # the version of the one session that is remembered


@dataclass(frozen=True, eq=False)
class Seat:
    """``key`` signs (Ed25519), ``peers`` are the public halves of all sites' keys, ``desk`` is where a session is kept."""

    name: str
    pact: Pact
    desk: Memory
    key: bytes
    peers: Mapping[str, bytes]
    agreed: str | None = None

    # -- the steps ---------------------------------------------------------------------------------------------------
    def enter(self, facts: Mapping[str, Any], upload: Any, weight: float | None) -> dict[str, Any]:
        """Keep an upload for a new session, which ends the one before, and return the site's public keys."""
        number = [facts["round"]["number"], facts["round"]["exchange"]]
        self._check_opened(facts["run"], number)
        values = self.pact.flat(upload, weight)
        self.pact.encode(values)  # refused before anybody counts on it
        private = {"lock": masks.fresh().hex(), "mask": masks.fresh().hex()}
        about = [str(facts["session"]), *number, facts["next"]]
        public = {use: masks.public_of(bytes.fromhex(secret)).hex() for use, secret in private.items()}
        signer = masks.library().Ed25519PrivateKey.from_private_bytes(self.key)
        signed = signer.sign(keys_signed(self.agreed, facts["run"], about, self.name, public)).hex()
        mine = {**public, "signed": signed}
        self._keep(facts["run"], {"about": about, "private": private, "public": mine, "step": "enter"}, values)
        return {"keys": mine}

    def share(self, asked: Parcel) -> tuple[dict[str, Any], Any]:
        """Return, locked for each member, its shares of this site's key and seed."""
        run, session, values = self._session(asked, "enter")
        members = {str(name): dict(keys) for name, keys in asked.facts["members"].items()}
        self._check_members(run, session["about"], members, session["public"])
        order, needed = sorted(members), self.pact.needed(len(members))
        about = transcript(self.agreed, run, session["about"], self.pact, members)
        seed = masks.fresh()
        of_key = masks.split(bytes.fromhex(session["private"]["mask"]), len(order), needed)
        of_seed = masks.split(seed, len(order), needed)
        lock = bytes.fromhex(session["private"]["lock"])
        locked, own = {}, ""
        for place, name in enumerate(order):
            both = of_key[place] + of_seed[place]
            if name == self.name:
                own = both.hex()
                continue
            between = masks.agree(lock, bytes.fromhex(members[name]["lock"]), "lock", about, self.name, name)
            locked[name] = masks.lock(between, both, about).hex()
        more = {"step": SHARE, "members": members, "seed": seed.hex(), "shares": {self.name: own}}
        self._keep(run, {**session, **more}, values)
        return {"shares": locked, "promise": promise(about, self.name, seed)}, {}

    def mask(self, asked: Parcel) -> tuple[dict[str, Any], Any]:
        """Return the upload under its masks."""
        run, session, values = self._session(asked, SHARE)
        members, pact = session["members"], self.pact
        others = {str(name): str(text) for name, text in asked.facts["shares"].items() if name != self.name}
        present = sorted([*others, self.name])
        if not set(present) <= set(members) or len(present) < pact.needed(len(members)):
            raise InvalidData(
                f"the server wants a sum of {len(present)} of {len(members)} sites, which is not enough to hide one"
            )
        about = transcript(self.agreed, run, session["about"], pact, members)
        lock, own = (bytes.fromhex(session["private"][use]) for use in ("lock", "mask"))
        shares = dict(session["shares"])
        total = pact.encode(pact.hidden(values, pact.needed(len(members)))).copy()
        total += masks.stream(bytes.fromhex(session["seed"]), len(total), pact.bits)
        for name, text in others.items():
            between = masks.agree(lock, bytes.fromhex(members[name]["lock"]), "lock", about, name, self.name)
            shares[name] = masks.unlock(between, _bytes(text, name), about).hex()
            total += pair_mask(own, members, self.name, name, about, len(total), pact.bits)
        more = {"step": MASK, "shares": shares, "present": present, "seed": "", "private": {}}
        self._keep(run, {**session, **more}, np.zeros(0))  # the upload and the keys are not needed any more
        return {}, {"masked": torch.from_numpy(total.view(total.dtype.str.replace("u", "i")))}

    def reveal(self, asked: Parcel) -> tuple[dict[str, Any], Any]:
        """Return this site's shares: of the seeds of those whose uploads are in the sum, of the keys of those who are lost."""
        run, session, _ = self._session(asked, MASK, REVEAL)
        there = sorted(map(str, asked.facts["there"]))
        present, members = session["present"], session["members"]
        if len(set(there)) < len(there) or not set(there) <= set(present) or self.name not in there:
            raise InvalidData("the server wants to open a sum of others than it asked; nothing is opened")
        if len(there) < self.pact.needed(len(members)):
            raise InvalidData(f"the server wants to open a sum of {len(there)} of {len(members)} sites, which would not hide one")
        if session["step"] == MASK:
            self._count_opened(run, session["about"][1:3])
            self._keep(run, {**session, "step": REVEAL, "there": there}, np.zeros(0))
        elif session["there"] != there:
            raise InvalidData("the server wants to open a second sum of the same uploads, whose difference would show one")
        shares = {name: bytes.fromhex(text) for name, text in session["shares"].items()}
        lost = [name for name in present if name not in there]
        return {
            "keys": {name: shares[name][: masks.SHARE].hex() for name in lost},
            "seeds": {name: shares[name][masks.SHARE :].hex() for name in there},
        }, {}

    # -- what is refused ---------------------------------------------------------------------------------------------
    def _check_members(
        self, run: str, about: list[Any], members: Mapping[str, Mapping[str, str]], own: Mapping[str, str]
    ) -> None:
        lib = masks.library()
        if len(members) < self.pact.threshold:
            raise InvalidData(
                f"the server wants a sum of {len(members)} sites; it was agreed that none is of fewer than {self.pact.threshold}"
            )
        if dict(members.get(self.name, {})) != dict(own):
            raise InvalidData("the server does not have this site's keys; it does not keep to the protocol")
        for name, keys in members.items():
            try:
                public = lib.Ed25519PublicKey.from_public_bytes(self.peers[name])
                said = {use: str(keys[use]) for use in ("lock", "mask")}
                public.verify(bytes.fromhex(keys["signed"]), keys_signed(self.agreed, run, about, name, said))
            except (KeyError, ValueError, TypeError, lib.InvalidSignature):
                raise InvalidData(
                    f"the keys that the server gives for {name} are not signed by {name}; compare the files in peers/"
                ) from None

    def _check_opened(self, run: str, number: list[int]) -> dict[str, int]:
        path = self.desk.folder / run / OPENED
        opened: dict[str, int] = json.loads(files.read(path)) if path.exists() else {}
        if opened.get(_word(number), 0) >= self.pact.repeats:
            raise InvalidData(
                f"this site has helped to open {self.pact.repeats} sum(s) of round {number[0]}; one more could show an upload"
            )
        return opened

    def _count_opened(self, run: str, number: list[int]) -> None:
        opened = self._check_opened(run, number)
        word = _word(number)
        files.write_json(self.desk.folder / run / OPENED, {**opened, word: opened.get(word, 0) + 1})

    # -- what lasts from one message to the next ---------------------------------------------------------------------
    def _keep(self, run: str, session: Mapping[str, Any], values: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(session).encode()), dtype=torch.uint8)
        self.desk.keep(run, ONLY, {"session": text, "upload": torch.from_numpy(values)})

    def _session(self, asked: Parcel, *after: str) -> tuple[str, dict[str, Any], Any]:
        """Return (run, session, upload) where this is the step that comes now."""
        run = str(asked.facts["run"])
        _, state = self.desk.recall(run, ONLY)
        session = json.loads(bytes(state["session"].numpy())) if state is not None else None
        if session is None or session["about"][0] != asked.facts.get("session"):
            raise InvalidData("the server goes on with a sum that this site is not in; it waits for the next")
        if session["step"] not in after:
            raise InvalidData(f"the server asks to {asked.facts['action']} after {session['step']}; every step is taken once")
        return run, session, state["upload"].numpy()


def _bytes(text: str, name: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidData(f"the share of {name} cannot be read; it does not keep to the protocol") from None


def _word(number: list[int]) -> str:
    return f"{number[0]}/{number[1]}"


def keys_signed(agreed: str | None, run: str, about: list[Any], name: str, public: Mapping[str, str]) -> bytes:
    """Return what a site signs: its public keys, for this session only."""
    return masks.digest(["keys", agreed, run, about, name, public["lock"], public["mask"]])


def transcript(agreed: str | None, run: str, about: list[Any], pact: Pact, members: Mapping[str, Mapping[str, str]]) -> bytes:
    """Return a checksum of all that the members of a sum must have been told alike."""
    keys = [[name, members[name]["lock"], members[name]["mask"]] for name in sorted(members)]
    return masks.digest(["sum", agreed, run, about, pact.plain(), keys])


def promise(about: bytes, name: str, seed: bytes) -> str:
    """Return what shows later that a seed was put together rightly, and does not give it away."""
    return masks.digest(["seed", about, name, seed]).hex()


def pair_mask(
    private: bytes, members: Mapping[str, Mapping[str, str]], mine: str, other: str, about: bytes, count: int, bits: int
) -> masks.Words:
    """Return the mask that ``mine`` adds for ``other``: what the other one adds for it is the negative."""
    seed = masks.agree(private, bytes.fromhex(members[other]["mask"]), "mask", about, *sorted((mine, other)))
    words = masks.stream(seed, count, bits)
    return words if mine < other else -words
