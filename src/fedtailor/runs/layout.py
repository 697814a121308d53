"""The run directory: which file is which, who is at work in it, and what may not be there."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from fedtailor.errors import BadRun
from fedtailor.runs import files

FORMAT = 3  # of the run directory; a newer one is refused. From 2 on, a finished one has a manifest
MANY = 10_000  # with more clients than this, what is kept of each is in files of bytes and not in lines

CONFIG = "config.toml"
HISTORY = "history.jsonl"
TIMING = "timing.jsonl"
SUMMARY = "summary.json"
MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"
CHECKPOINTS = "checkpoints"
IDENTITY = "checkpoints/identity.json"
MODELS = "models"
MEASURES = "measures"  # of very many clients, a file per evaluation
ONBOARDED = "onboarded"  # models of clients that came after the run was finished; not part of its manifest
RUNS = "runs"
TUNING = "tuning"
YARDSTICKS = "yardsticks.json"  # of a comparison: what its methods are held against
FAILED = "failed.json"  # in the folder of a method of a comparison: why it could not be measured
ERROR = "error.txt"  # beside it: where in the code
LOCK = ".lock"
FILES = (CONFIG, HISTORY, TIMING, SUMMARY, MANIFEST, SIGNATURE, YARDSTICKS, LOCK)
FOLDERS = (CHECKPOINTS, MODELS, MEASURES, ONBOARDED, RUNS, TUNING)


def lock(folder: Path) -> IO[bytes]:
    """Hold the directory for this process, as long as the file returned is open."""
    lock_file = files.open_to_append(folder / LOCK)
    try:
        _hold(lock_file)
    except OSError as error:
        lock_file.close()
        raise BadRun(f"another process is at work in {folder}; wait for it or stop it first") from error
    return lock_file


if sys.platform == "win32":
    import msvcrt

    def _hold(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _hold(file: IO[bytes]) -> None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: processes that inherit it could outlive us


def refuse_links(folder: Path) -> None:
    """Refuse a directory in which one of our files or folders is a link, a pipe or a device: it would lead elsewhere."""
    for path in (folder / name for name in FILES):
        _refuse_unless(stat.S_ISREG, path)
    for path in (folder / name for name in FOLDERS):
        _refuse_unless(stat.S_ISDIR, path)
        for entry in _below(path):
            _refuse_unless(_is_file_or_folder if path.name == RUNS else stat.S_ISREG, entry)


def refuse_links_between(folder: Path, path: Path) -> None:
    """Refuse a path below ``folder`` that leads through a link: whoever made the folder would choose where it ends."""
    inside, target = Path(os.path.abspath(folder)), Path(os.path.abspath(path))
    for place in (target, *target.parents):
        if place.is_relative_to(inside) and place != inside and place.is_symlink() and (place != target or place.is_dir()):
            raise BadRun(f"{place} is a link, which leads elsewhere; remove it, or write to another place")


def _is_file_or_folder(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):  # which follows no link
        yield from (Path(root, name) for name in (*folders, *names))


def _refuse_unless(allowed: Callable[[int], bool], path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise BadRun(f"{path} cannot be read ({error.strerror}); check who may read it") from error
    if not allowed(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "not what it should be"
        raise BadRun(f"{path} is {kind}; a run directory holds files and folders only: put the original in its place")
