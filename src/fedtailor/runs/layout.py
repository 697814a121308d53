"""The run directory: which file is which, and how it is read."""

from __future__ import annotations

import fcntl
import json
import tomllib
from pathlib import Path
from typing import IO, Any

from fedtailor.errors import BadRun
from fedtailor.runs import files
from fedtailor.version import __version__

FORMAT = 1  # of the run directory; a newer one is refused

CONFIG = "config.toml"
HISTORY = "history.jsonl"
TIMING = "timing.jsonl"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"
IDENTITY = "checkpoints/identity.json"
MODELS = "models"
RUNS = "runs"
TUNING = "tuning"
LOCK = ".lock"


def lock(folder: Path) -> IO[bytes]:
    """Hold the directory for this process, as long as the file returned is open."""
    with files.saying(folder / LOCK):
        held = open(folder / LOCK, "wb")  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: workers would inherit it and outlive us
    except OSError as error:
        held.close()
        raise BadRun(f"another process is at work in {folder}; wait for it or stop it first") from error
    return held


def check_version(folder: Path) -> dict[str, Any]:
    """The configuration of a run directory; refused where it is none or comes from a newer version."""
    path = folder / CONFIG
    try:
        config = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise BadRun(f"{folder} is not a run directory (it has no {CONFIG})") from None
    except (OSError, ValueError) as error:
        raise BadRun(f"{path} cannot be read ({error}); give the directory of a run") from error
    made = config.get("format")
    if not isinstance(made, int):
        raise BadRun(f"{path} does not say which format the directory has; it was not written by fedtailor")
    if made > FORMAT:
        raise BadRun(
            f"{folder} was written by fedtailor {config.get('version')}, newer than this {__version__}; upgrade fedtailor"
        )
    return config


def lines_of(path: Path, length: int | None = None) -> list[dict[str, Any]]:
    """The whole lines of a json-lines file (a last line cut short is left out)."""
    try:
        data = path.read_bytes()[:length]
    except FileNotFoundError:
        return []
    out = []
    for line in data.split(b"\n")[:-1]:
        try:
            out.append(json.loads(line))
        except ValueError:
            break
    return out


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise BadRun(f"{path} cannot be read ({error}); the run cannot be resumed") from error
