"""Limits on what a file may unpack to, so that a small file cannot fill the memory."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fedtailor.errors import InvalidArgument, InvalidData

VARIABLE = "FEDTAILOR_MAX_UNPACKED"  # in the environment: bytes that a file may unpack to
LEAST = 1 << 30  # bytes that any file may unpack to
RATIO = 50  # and otherwise so many times its size
CELL = 8  # bytes of a cell of a table, at least


def allowance(path: Path) -> int:
    """Return how many bytes a file may unpack to."""
    chosen = os.environ.get(VARIABLE)
    if chosen is None:
        return max(LEAST, RATIO * path.stat().st_size)
    try:
        return int(float(chosen))
    except (ValueError, OverflowError):
        raise InvalidArgument(f"{VARIABLE}={chosen!r} is no number of bytes; give one, for instance 8e9") from None


def too_large(path: Path, size: int | None = None) -> InvalidData:
    """Return the error for a file that unpacks to more than it may."""
    amount = "more" if size is None else f"{size:,} bytes, more"
    return InvalidData(
        f"{str(path)!r} unpacks to {amount} than the {allowance(path):,} bytes that a file of its size may; if you trust it, set "
        f"{VARIABLE} to a larger number of bytes"
    )


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked if it ends in .gz; reading on beyond what it may unpack to is refused."""
    if path.suffix.lower() != ".gz":
        with path.open("rb") as file:
            yield file
        return
    with gzip.open(path) as packed:
        yield io.BufferedReader(_Counted(packed, path), 1 << 20)


def read_unpacked(path: Path) -> bytes:
    """Return the bytes of a file, unpacked if it ends in .gz."""
    with open_unpacked(path) as file:
        return file.read()


def check_archive(path: Path) -> None:
    """Refuse a zip file (an .npz is one) whose files are too large together; what is none is left to its reader."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except zipfile.BadZipFile:
        return
    if size > allowance(path):
        raise too_large(path, size)


def check_parquet(path: Path) -> None:
    """Refuse a parquet file whose columns are too large together, as stored or as cells."""
    from pyarrow import parquet

    about: Any = parquet.read_metadata(path)
    stored = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
    size = max(stored, about.num_rows * about.num_columns * CELL)
    if size > allowance(path):
        raise too_large(path, size)


class _Counted(io.RawIOBase):
    """A file that is read up to its allowance."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path, self._left = file, path, allowance(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise too_large(self._path)
        return count
