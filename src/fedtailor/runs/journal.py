"""Journal: a run directory while the run is under way. What is on disk is always enough to go on from."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.runs import checkpoint, files
from fedtailor.runs.checkpoint import Checkpoint
from fedtailor.runs.layout import (
    CHECKPOINTS,
    CONFIG,
    FORMAT,
    HISTORY,
    IDENTITY,
    SUMMARY,
    TIMING,
    check_version,
    lines_of,
    lock,
    read_json,
)
from fedtailor.runs.record import per_client
from fedtailor.version import __version__

EVERY_CLIENT = 10_000  # with more clients than this, only the last evaluation is written client by client
PAUSE = 2.0  # seconds between checkpoints, at least
SHARE = 20  # checkpoints take at most one part in this of the time


@dataclass(frozen=True)
class Found:
    """What a directory holds of a run: the newest checkpoint, the records up to it, and the summary if it is finished."""

    checkpoint: Checkpoint
    records: list[dict[str, Any]]
    summary: dict[str, Any] | None


class Journal:
    """Writes the run directory ``folder``; one process at a time."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], identity: Mapping[str, Any], resume: bool, every: int | None
    ) -> None:
        self.folder, self.every = folder, every
        holds = any((folder / name).exists() for name in (SUMMARY, HISTORY, CONFIG))
        if holds and not resume:
            raise InvalidArgument(f"{folder} holds another run; resume it (fedtailor resume {folder}) or give a new directory")
        with files.saying(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._open_files: list[IO[Any]] = []
        try:
            self._begin(config, identity, holds)
        except BaseException:
            self.close()
            raise

    def _begin(self, config: Mapping[str, Any], identity: Mapping[str, Any], holds: bool) -> None:
        folder = self.folder
        self._open_files.append(lock(folder))
        if holds:
            check_version(folder)
        known = read_json(folder / IDENTITY) if holds else None
        if known is None:  # new, or stopped before it had begun
            files.write(folder / CONFIG, tomli_w.dumps({"format": FORMAT, "version": __version__, **config}))
            files.write_json(folder / IDENTITY, dict(identity))
        else:
            _compare(folder, known, json.loads(json.dumps(dict(identity))))
        self.found = self._find() if known is not None else None
        self._open(self.found)

    # -- reading -----------------------------------------------------------------------------------------------------
    def _find(self) -> Found | None:
        kept = checkpoint.newest(self.folder / CHECKPOINTS, self._reaches)
        if kept is None:
            if lines_of(self.folder / HISTORY):
                warnings.warn(f"{self.folder} holds no checkpoint that can be used; the run begins anew", stacklevel=4)
            return None
        lines = lines_of(self.folder / HISTORY, kept.facts["history_bytes"])
        spent = {line["round"]: line["seconds"] for line in lines_of(self.folder / TIMING)}
        records = [{**line, "seconds": spent.get(line["round"], 0.0)} for line in lines if "client" not in line]
        return Found(kept, records, read_json(self.folder / SUMMARY) if kept.facts.get("finished") else None)

    def _reaches(self, facts: dict[str, Any]) -> bool:
        """True if the history is there, unchanged, up to where the checkpoint was written."""
        path = self.folder / HISTORY
        if not path.exists():
            return facts["history_bytes"] == 0
        with open(path, "rb") as file:
            data = file.read(facts["history_bytes"])
        return len(data) == facts["history_bytes"] and hashlib.sha256(data).hexdigest() == facts["history_sha256"]

    def _open(self, found: Found | None) -> None:
        """Cut the history back to the checkpoint and go on from there."""
        length = 0 if found is None else found.checkpoint.facts["history_bytes"]
        with files.saying(self.folder / HISTORY):
            self._history = self._opened(HISTORY, "ab")
            self._history.truncate(length)
            self._hash = hashlib.sha256((self.folder / HISTORY).read_bytes())
            files.write(self.folder / TIMING, "".join(map(_timing, found.records)) if found else "")
            self._timing = self._opened(TIMING, "ab")
        self._length, self._saved, self._cost = length, time.perf_counter(), 0.0

    # -- writing -----------------------------------------------------------------------------------------------------
    def record(
        self, record: Mapping[str, Any], names: Sequence[str], clients: Mapping[str, NDArray[np.float64]] | None, last: bool
    ) -> None:
        """A line for the round, and one per client if it was evaluated. Time goes to a file of its own: it never repeats."""
        lines = [{k: v for k, v in record.items() if k != "seconds"}]
        if clients is not None and (last or len(names) <= EVERY_CLIENT):
            lines += [{"round": record["round"], "client": name, **measures} for name, measures in per_client(names, clients)]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        with files.saying(self._path(HISTORY)):
            self._history.write(data)
            self._history.flush()
            self._timing.write(_timing(record).encode())
            self._timing.flush()
        self._hash.update(data)
        self._length += len(data)

    def due(self, number: int) -> bool:
        """True when ``number`` rounds are done and it is time for a checkpoint."""
        if self.every is not None:
            return number % self.every == 0
        return time.perf_counter() - self._saved > max(PAUSE, SHARE * self._cost)

    def checkpoint(self, number: int, state: Any, facts: Mapping[str, Any]) -> None:
        began = time.perf_counter()
        with files.saying(self._path(HISTORY)):
            os.fsync(self._history.fileno())
        own = {"format": FORMAT, "history_bytes": self._length, "history_sha256": self._hash.hexdigest()}
        checkpoint.save(self.folder / CHECKPOINTS, Checkpoint(number, state, {**facts, **own}))
        self._saved = time.perf_counter()
        self._cost = self._saved - began

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The summary is written last: a directory that has one is a finished run."""
        files.write_json(self._path(SUMMARY), summary)

    def close(self) -> None:
        for file in self._open_files:
            with suppress(OSError):  # a full disk was said before; what the file lacks is cut off when the run goes on
                file.close()

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _opened(self, name: str, mode: str) -> IO[Any]:
        file: IO[Any] = open(self.folder / name, mode)  # noqa: SIM115 (closed by close)
        self._open_files.append(file)
        return file


def _timing(record: Mapping[str, Any]) -> str:
    return json.dumps({"round": record["round"], "seconds": record["seconds"]}) + "\n"


def _compare(folder: Path, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for what in {**known, **now}:
        if known.get(what) != now.get(what):
            names = {"data": "other data", "start": "another start"}
            shown = names.get(what) or f"{what}={_word(known.get(what))}, not {_word(now.get(what))}"
            raise BadRun(
                f"the run in {folder} was begun with {shown}; resume it with what it began with, or give a new directory"
            )


def _word(value: Any) -> str:
    return "its default" if value is None else repr(value)
