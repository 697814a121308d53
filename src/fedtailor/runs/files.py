"""Files that are whole or not there: written beside under a name that nobody can guess, forced to disk, then renamed.

No link is followed: whoever hands over a run directory must not choose which files are written.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from fedtailor.errors import CannotWrite, DamagedRun

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LINK = (errno.ELOOP, errno.EMLINK)  # what a link is refused with, by system
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe in place of a file is opened at once, and refused
PRIVATE = 0o600  # only the owner may read it
UNFINISHED = re.compile(r"\.fedtailor-[0-9a-f]{32}\.part")  # what a kill in the middle of ``write`` leaves


def write(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Replace the file by ``content``, whole or not at all, even if the machine stops in the middle."""
    data = content.encode() if isinstance(content, str) else content
    part = path.with_name(f".fedtailor-{secrets.token_hex(16)}.part")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "xb", opener=partial(os.open, mode=mode)) as file:  # x: never a file or link that is there
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace the file by ``value`` as json."""
    write(path, json.dumps(value, indent=2) + "\n")


def open_to_append(path: Path) -> IO[bytes]:
    """Open a file, made if need be, to write at its end."""
    with explained(path):
        return open(path, "ab", opener=_without_links)


def open_anew(path: Path) -> IO[bytes]:
    """Open a file, made or emptied, to write to it."""
    with explained(path):
        return open(path, "wb", opener=_without_links)


def read(path: Path) -> bytes:
    """Return the bytes of a regular file; a link, a pipe or a device is refused."""
    try:
        with open(path, "rb", opener=_without_links) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno not in LINK:
            raise DamagedRun(f"{path} cannot be read ({error.strerror}); check who may read it, or copy the run again") from error
    raise DamagedRun(f"{path} is not a regular file; put the file itself in its place")


def mapped(path: Path) -> mmap.mmap:
    """Return the bytes of a regular file, read where they are looked at; a link, a pipe or a device is refused."""
    try:
        with open(path, "rb", opener=_without_links) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DamagedRun(f"{path} is missing; restore it from a copy, or train anew") from None
    except (OSError, ValueError) as error:  # a ValueError: it is empty
        raise DamagedRun(f"{path} cannot be read ({error}); restore it from a copy, or train anew") from error
    raise DamagedRun(f"{path} is not a regular file; put the file itself in its place")


def remove_unfinished(folder: Path) -> None:
    """Remove what writers that were killed left in a folder; a file of any other name is somebody's own."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn failures of the file system into one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise CannotWrite(
                f"the disk is full: {path} could not be written; free some space and resume: what was written before is intact"
            ) from error
        if error.errno in LINK:
            raise CannotWrite(f"cannot write {path}: it is a link; remove it, or give another directory") from error
        raise CannotWrite(f"cannot write {path} ({error.strerror}); give a directory you may write to") from error


def _without_links(name: str, flags: int) -> int:
    return os.open(name, flags | NO_FOLLOW | NO_WAIT, 0o666)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
