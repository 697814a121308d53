"""Files that are whole or not there: written beside, forced to disk, then renamed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedtailor.errors import CannotWrite

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write(path: Path, content: bytes | str) -> None:
    """Replace the file by ``content``, whole or not at all, even if the machine stops in the middle."""
    data = content.encode() if isinstance(content, str) else content
    part = path.with_name(path.name + ".part")
    with saying(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def saying(path: Path) -> Iterator[None]:
    """Failures of the file system as one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise CannotWrite(
                f"the disk is full: {path} could not be written; free some space and resume: what was written before is intact"
            ) from error
        raise CannotWrite(f"cannot write {path} ({error.strerror}); give a directory you may write to") from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
