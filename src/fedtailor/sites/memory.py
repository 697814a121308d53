"""Memory: a client's personal state on the disk of its site, by run and version, so that no restart loses it.

A version is the number of exchanges that the server had begun when the state was made; it only grows. The server says which one
it builds on, so work that it never received does not count: the client goes on from the state before it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fedtailor import tree
from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.runs import files

NAME = re.compile(r"version-(\d{7,})\.state")
WORD = re.compile(r"[\w.-]{1,80}")  # of a run's name, which becomes that of a folder
DIGEST = 32
TOKEN = b"gAAAAA"  # how everything begins that is encrypted
BORN = 0  # the version of a client that has not been visited


@dataclass(frozen=True, eq=False)
class Memory:
    """The states of one client in ``folder``; with a ``key`` (``new_key``) they are encrypted."""

    folder: Path
    key: bytes | None = None

    def _run(self, run: str) -> Path:
        if not WORD.fullmatch(run) or run.startswith("."):
            raise InvalidArgument(f"{run!r} is no name of a run; use letters, digits, - and _")
        return self.folder / run

    def versions(self, run: str) -> list[int]:
        """Return the versions that are there and whole, oldest first."""
        folder = self._run(run)
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        versions = sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))
        return [version for version in versions if self._read(run, version) is not None]

    def keep(self, run: str, version: int, personal: Any) -> None:
        """Write a state, whole or not at all."""
        data = tree.pack(personal)
        data = hashlib.sha256(data).digest() + data
        files.write(self._path(run, version), seal(data, self.key), files.PRIVATE)

    def recall(self, run: str, version: int) -> tuple[int, Any]:
        """Return (version, state) of this version, of the newest one before it where it is lost, or (``BORN``, None)."""
        files.remove_unfinished(self._run(run))
        for known in sorted((v for v in self.versions(run) if v <= version), reverse=True):
            return known, self._read(run, known)
        return BORN, None

    def forget(self, run: str, before: int) -> None:
        """Remove the states older than the newest one that is not newer than ``before``: nobody will ask for them."""
        old = [version for version in self.versions(run) if version <= before]
        for version in old[:-1]:
            self._path(run, version).unlink(missing_ok=True)

    def _path(self, run: str, version: int) -> Path:
        return self._run(run) / f"version-{version:07d}.state"

    def _read(self, run: str, version: int) -> Any:
        """Return a state, or None where the file is missing or damaged; one that another key has locked is refused."""
        path = self._path(run, version)
        try:
            data = files.read(path)
        except (FileNotFoundError, BadRun):
            return None
        data = unseal(data, self.key, path)
        if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
            return None
        try:
            return tree.unpack(data[DIGEST:])
        except (SafetensorError, ValueError, KeyError):
            return None


def seal(data: bytes, key: bytes | None) -> bytes:
    """Return the data as they are written: encrypted where there is a key."""
    return _fernet(key).encrypt(data) if key else data


def unseal(data: bytes, key: bytes | None, path: Path) -> bytes:
    """Return what was sealed in a file; what another key has locked, or no key unlocks, is refused."""
    if not key:
        if data.startswith(TOKEN):
            raise BadRun(f"{path} is encrypted; give the key it was written with")
        return data
    from cryptography.fernet import InvalidToken

    try:
        return _fernet(key).decrypt(data)
    except InvalidToken:
        raise BadRun(f"{path} was not written with this key, or was changed; give the key it was written with") from None


def new_key() -> bytes:
    """Return a key to encrypt states with."""
    return _library().generate_key()


def _fernet(key: bytes) -> Any:
    try:
        return _library()(key)
    except ValueError:
        raise InvalidArgument(
            "the key of the site's state is not one that fedtailor made; use the file it was written to"
        ) from None


def _library() -> Any:
    try:
        from cryptography.fernet import Fernet
    except ImportError:
        raise InvalidArgument('encryption needs the package cryptography: pip install "fedtailor[flower]"') from None
    return Fernet
