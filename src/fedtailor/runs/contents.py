"""The contents of a run directory, each file checked against the manifest as it is read.

A manifest is written last: a directory that has one is finished, and holds what it held then. Directories of format 1 had none.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fedtailor.errors import BadRun, DamagedRun, FedtailorError
from fedtailor.runs import files
from fedtailor.runs.layout import CONFIG, FILES, FOLDERS, FORMAT, MANIFEST, SUMMARY, refuse_links
from fedtailor.version import __version__

BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Contents:
    """The files of ``folder``; ``digests`` are those of its manifest, None where it has none."""

    folder: Path
    config: Mapping[str, Any]
    digests: Mapping[str, str] | None

    @property
    def finished(self) -> bool:
        """Return whether the run or comparison came to its end."""
        return self.digests is not None or (self.config["format"] == 1 and (self.folder / SUMMARY).exists())

    def require_finished(self, kind: str = "run") -> None:
        """Refuse what is not finished, saying how to go on with it."""
        if not self.finished:
            raise BadRun(f"the {kind} in {self.folder} is not finished; go on with it: fedtailor resume {self.folder}")

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes as they were when the run was finished; None where there was no such file."""
        if self.digests is not None and name not in self.digests:
            return None
        try:
            data = files.read(self.folder / name)
        except FileNotFoundError:
            if self.digests is None:
                return None
            raise DamagedRun(f"{self.folder / name} is missing; restore it from a copy, or train anew") from None
        if self.digests is not None and digest(data) != self.digests[name]:
            raise DamagedRun(
                f"{self.folder / name} was changed after the run was finished (its digest is not the one in {MANIFEST}); "
                "restore it from a copy, or train anew"
            )
        return data

    def json(self, name: str) -> dict[str, Any] | None:
        """Return a json object; None where there is no such file."""
        data = self.read(name)
        return None if data is None else parsed(data, self.folder / name)

    def lines(self, name: str, length: int | None = None) -> list[dict[str, Any]]:
        """Return the whole lines of a json-lines file (a last line cut short is left out)."""
        return lines_of((self.read(name) or b"")[:length])

    def inside(self, name: str) -> Contents:
        """Return the contents of a run directory inside this one."""
        if self.digests is None:
            return open_contents(self.folder / name)
        expected = self.digests.get(f"{name}/{MANIFEST}")
        if expected is None:
            raise DamagedRun(f"{self.folder / MANIFEST} does not list {name}; restore it from a copy, or train anew")
        return open_contents(self.folder / name, expected)


def open_contents(folder: Path, expected: str | None = None) -> Contents:
    """Return the contents of a run directory; refused where it is none, leads elsewhere or comes from a newer version.

    ``expected`` is the digest of its manifest, where another manifest says it.
    """
    refuse_links(folder)
    config = _config(folder)
    manifest = _manifest(folder, expected)
    contents = Contents(folder, config, manifest)
    contents.read(CONFIG)  # which is checked like any other
    return contents


def verify_all(contents: Contents) -> int:
    """Check every file against the manifest, those of runs inside included; return how many there are."""
    contents.require_finished()
    if contents.digests is None:
        raise BadRun(f"{contents.folder} carries no digests (an earlier version wrote it), so that nothing can be checked")
    count = 0
    for name in contents.digests:
        path = PurePosixPath(name)
        if path.parts[0] not in (*FILES, *FOLDERS) or ".." in path.parts:
            raise BadRun(f"{contents.folder / MANIFEST} lists {name!r}, which is no file of a run; restore it from a copy")
        contents.read(name)
        count += 1 if path.name != MANIFEST else 1 + verify_all(contents.inside(path.parent.as_posix()))
    return count


def note_missing_digests(contents: Contents) -> None:
    """Say so where a finished run has no digests, and changes cannot be noticed."""
    if contents.finished and contents.digests is None:
        warnings.warn(
            f"{contents.folder} carries no digests (an earlier version wrote it): changes to its files cannot be noticed",
            stacklevel=3,
        )


def write_manifest(folder: Path, names: Iterable[str], known: Mapping[str, str] | None = None) -> None:
    """Write the digests of these files: those ``known``, and the others as they are on disk."""
    digests = dict(known or {})
    digests |= {name: digest(files.read(folder / name)) for name in names if name not in digests}
    files.write_json(folder / MANIFEST, {"files": dict(sorted(digests.items())), "seal": _seal(digests)})


def digest(data: bytes) -> str:
    """Return the sha256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def parsed(data: bytes, path: Path) -> dict[str, Any]:
    """Return a json object, refused where it is none."""
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise DamagedRun(f"{path} cannot be read ({why}); restore it from a copy, or train anew") from error


def lines_of(data: bytes) -> list[dict[str, Any]]:
    """Return the whole lines of json lines, up to the first that is none."""
    lines = []
    for line in data.split(b"\n")[:-1]:
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return lines


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Refuse files that were tampered with, whatever it is that they break."""
    try:
        yield
    except FedtailorError:
        raise
    except BROKEN as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DamagedRun(f"{folder} holds a file that was changed or cut short ({why}); restore it, or train anew") from error


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = tomllib.loads(files.read(path).decode())
    except (FileNotFoundError, NotADirectoryError):
        raise BadRun(f"{folder} is not a run directory (it has no {CONFIG})") from None
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise DamagedRun(f"{path} cannot be read ({why}); give the directory of a run") from error
    made = config.get("format")
    if not isinstance(made, int) or isinstance(made, bool) or made < 1:
        raise BadRun(f"{path} does not say which format the directory has; it was not written by fedtailor")
    if made > FORMAT:
        raise BadRun(
            f"{folder} was written by fedtailor {config.get('version')}, newer than this {__version__}; upgrade fedtailor"
        )
    return config


def _manifest(folder: Path, expected: str | None) -> dict[str, str] | None:
    path = folder / MANIFEST
    try:
        data = files.read(path)
    except FileNotFoundError:
        if expected is None:
            return None
        raise DamagedRun(f"{path} is missing; restore it from a copy, or train anew") from None
    if expected is not None and digest(data) != expected:
        raise DamagedRun(f"{path} is not that of the comparison; restore it from a copy, or train anew")
    manifest = parsed(data, path)
    digests = manifest.get("files")
    if (
        not isinstance(digests, dict)
        or not all(isinstance(word, str) for pair in digests.items() for word in pair)
        or manifest.get("seal") != _seal(digests)
        or not {CONFIG, SUMMARY} <= digests.keys()
    ):
        raise DamagedRun(f"{path} was changed or cut short; restore it from a copy, or train anew")
    return digests


def _seal(digests: Mapping[str, str]) -> str:
    return digest(json.dumps(digests, sort_keys=True).encode())
