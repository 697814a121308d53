"""Journal: a run directory while the run is under way. What is on disk is always enough to go on from."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.runs import checkpoint, files
from fedtailor.runs.checkpoint import Checkpoint
from fedtailor.runs.contents import digest, note_missing_digests, open_contents, readable, write_manifest
from fedtailor.runs.layout import (
    CHECKPOINTS,
    CONFIG,
    FORMAT,
    HISTORY,
    IDENTITY,
    MANIFEST,
    MANY,
    MEASURES,
    MODELS,
    SIGNATURE,
    SUMMARY,
    TIMING,
    lock,
    refuse_links,
)
from fedtailor.runs.record import lines_per_client, measures_file, write_measures
from fedtailor.runs.store import Store
from fedtailor.version import __version__

PAUSE = 2.0  # seconds between checkpoints, at least
LONGEST = 1e12  # seconds of a round
LENGTH = ("rounds", "evaluate_every")  # of a run's identity: what is another where it is given more rounds
SHARE = 20  # checkpoints take at most one part in this of the time


@dataclass(frozen=True)
class Earlier:
    """The part of a run that its directory holds: the newest checkpoint, the records up to it, and the summary if it is
    finished."""

    checkpoint: Checkpoint
    records: list[dict[str, Any]]
    summary: dict[str, Any] | None
    lengthened: bool = False  # the last record is that of what was then the last round

    @property
    def seconds(self) -> float:
        """Time taken up to the checkpoint."""
        return float(self.checkpoint.facts.get("seconds", sum(record["seconds"] for record in self.records)))


class Journal:
    """Writes the run directory ``folder``; one process at a time. A finished run is read and not written to.

    A run that is to have more rounds than it was begun with is opened again; ``lengthen``, given how many it had, refuses that.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        identity: Mapping[str, Any],
        resume: bool,
        every: int | None,
        lengthen: Callable[[int], None] | None = None,
    ) -> None:
        self.folder, self.every, self.lengthen = folder, every, lengthen
        begun = any((folder / name).exists() for name in (MANIFEST, SUMMARY, HISTORY, CONFIG))
        if begun and not resume:
            raise InvalidArgument(f"{folder} holds another run; resume it (fedtailor resume {folder}) or give a new directory")
        with files.explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._open_files: list[IO[bytes]] = []
        try:
            refuse_links(folder)
            self._open_files.append(lock(folder))
            self._begin(config, identity, begun)
        except BaseException:
            self.close()
            raise

    def _begin(self, config: Mapping[str, Any], identity: Mapping[str, Any], begun: bool) -> None:
        for name in ("", CHECKPOINTS, MODELS, MEASURES):
            files.remove_unfinished(self.folder / name)
        contents = open_contents(self.folder) if begun else None
        known = None if contents is None else contents.json(IDENTITY)
        self.earlier: Earlier | None = None
        if contents is None or known is None:  # new, or stopped before it had begun
            if contents is not None and contents.finished:
                raise BadRun(f"{self.folder / IDENTITY} is missing; restore it from a copy, or train anew")
            files.write(self.folder / CONFIG, tomli_w.dumps({"format": FORMAT, "version": __version__, **config}))
            files.write_json(self.folder / IDENTITY, dict(identity))
            self.contents = open_contents(self.folder)
        else:
            now = json.loads(json.dumps(dict(identity)))
            longer = self.lengthen is not None and _is_longer(known, now)
            _compare(self.folder, {**known, **{key: now.get(key) for key in LENGTH}} if longer else known, now)
            self.contents = contents
            with readable(self.folder):
                self.earlier = self._read()
            if longer:
                self._lengthen(known["rounds"], config, identity)
        if self.earlier is None or self.earlier.summary is None:
            self._open(self.earlier)

    def _lengthen(self, before: int, config: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Open a run again that was begun for fewer rounds, finished or not."""
        assert self.lengthen is not None
        self.lengthen(before)
        if self.earlier is not None and self.earlier.records and "stopped" in self.earlier.records[-1]:
            why = self.earlier.records[-1]["stopped"]
            raise BadRun(f"the run in {self.folder} ended by itself ({why}); more rounds would not change it")
        for name in (MANIFEST, SIGNATURE, measures_file(before - 1)):
            (self.folder / name).unlink(missing_ok=True)
        files.write(self.folder / CONFIG, tomli_w.dumps({"format": FORMAT, "version": __version__, **config}))
        files.write_json(self.folder / IDENTITY, dict(identity))
        self.contents = open_contents(self.folder)
        if self.earlier is not None:
            whole = len(self.earlier.records) == before
            self.earlier = replace(self.earlier, summary=None, lengthened=whole)

    # -- reading -----------------------------------------------------------------------------------------------------
    def _read(self) -> Earlier | None:
        contents, last = self.contents, self._last_checkpoint()
        if last is None:
            if contents.lines(HISTORY):
                warnings.warn(f"{self.folder} holds no checkpoint that can be used; the run begins anew", stacklevel=5)
            return None
        lines = contents.lines(HISTORY, last.facts["history_bytes"])
        spent = _seconds(contents.lines(TIMING))
        records = [{**line, "seconds": spent.get(line["round"], 0.0)} for line in lines if "client" not in line]
        finished = contents.finished and last.facts.get("finished")
        return Earlier(last, records, contents.json(SUMMARY) if finished else None)

    def _last_checkpoint(self) -> Checkpoint | None:
        if self.contents.digests is not None:
            return checkpoint.of_finished(self.contents)
        note_missing_digests(self.contents)
        history = self.contents.read(HISTORY) or b""

        def reached(facts: dict[str, Any]) -> bool:
            """Return whether the history is there, unchanged, up to where the checkpoint was written."""
            data = history[: facts["history_bytes"]]
            return len(data) == facts["history_bytes"] and digest(data) == facts["history_sha256"]

        return checkpoint.newest(self.folder / CHECKPOINTS, reached)

    def _open(self, earlier: Earlier | None) -> None:
        """Cut the history back to the checkpoint, to go on from there."""
        length = 0 if earlier is None else earlier.checkpoint.facts["history_bytes"]
        history = (self.contents.read(HISTORY) or b"")[:length]
        if earlier is not None and earlier.lengthened:  # its last round is written anew
            history = _before(history, len(earlier.records) - 1)
            length = len(history)
        files.write(self.folder / HISTORY, history)
        timed = [] if earlier is None else earlier.records[:-1] if earlier.lengthened else earlier.records
        files.write(self.folder / TIMING, "".join(map(_timing, timed)))
        self._history, self._timing = (files.open_to_append(self.folder / name) for name in (HISTORY, TIMING))
        self._open_files += [self._history, self._timing]
        self._hash, self._length = hashlib.sha256(history), length
        self._saved, self._cost = time.perf_counter(), 0.0
        self._parts = [] if earlier is None else list(earlier.checkpoint.facts.get("parts", ()))

    # -- writing -----------------------------------------------------------------------------------------------------
    def record(
        self, record: Mapping[str, Any], names: Sequence[str], clients: Mapping[str, NDArray[np.float64]] | None, last: bool
    ) -> None:
        """Write a line for the round, and one per client if it was evaluated. Time, which never repeats, has its own file."""
        text = json.dumps({k: v for k, v in record.items() if k != "seconds"}) + "\n"
        if clients is not None and len(names) <= MANY:
            text += lines_per_client(record["round"], names, clients)
        elif clients is not None and last:  # of so many clients the other evaluations are not written client by client
            text += write_measures(self.folder, record["round"], names, clients)
        data = text.encode()
        with files.explained(self.folder / HISTORY):
            self._history.write(data)
            self._history.flush()
            self._timing.write(_timing(record).encode())
            self._timing.flush()
        self._hash.update(data)
        self._length += len(data)

    def due(self, number: int) -> bool:
        """Return whether it is time for a checkpoint, ``number`` rounds being done."""
        if self.every is not None:
            return number % self.every == 0
        return time.perf_counter() - self._saved > max(PAUSE, SHARE * self._cost)

    def checkpoint(self, number: int, state: Any, facts: Mapping[str, Any], store: Store | None = None) -> None:
        """Write what is needed to go on after ``number`` rounds; of a ``store``, what changed since the checkpoint before."""
        began = time.perf_counter()
        with files.explained(self.folder / HISTORY):
            os.fsync(self._history.fileno())
        own = {"format": FORMAT, "history_bytes": self._length, "history_sha256": self._hash.hexdigest()}
        made = Checkpoint(number, state, {**facts, **own})
        self._parts = checkpoint.save(self.folder / CHECKPOINTS, made, store, self._parts)
        self._saved = time.perf_counter()
        self._cost = self._saved - began

    def digests(self) -> dict[str, str]:
        """Return the digests of all files but the summary, the last to be written."""
        for file in (self._history, self._timing):
            with files.explained(self.folder / HISTORY):
                os.fsync(file.fileno())
        names = [CONFIG, HISTORY, TIMING, *(path.relative_to(self.folder).as_posix() for path in self._results())]
        return {name: digest(files.read(self.folder / name)) for name in names}

    def finish(self, summary: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        """Write the summary, then the manifest, with the ``digests`` of the others: from then on the run is finished."""
        files.write_json(self.folder / SUMMARY, summary)
        write_manifest(self.folder, [SUMMARY], digests)

    def _results(self) -> list[Path]:
        """Return the files of models/, measures/ and checkpoints/; a secret is not among them, whose owner may take it away."""
        folders = (self.folder / name for name in (MODELS, MEASURES, CHECKPOINTS))
        paths = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
        return sorted(path for path in paths if path.suffix in (".json", ".safetensors"))

    def close(self) -> None:
        for file in self._open_files:
            with suppress(OSError):  # a full disk was said before; what the file lacks is cut off when the run goes on
                file.close()


def _seconds(lines: Sequence[Any]) -> dict[int, float]:
    """Return the seconds of each round; time is no result, so a line that makes no sense is left out."""
    good = [line for line in lines if isinstance(line, dict) and _is_duration(line.get("seconds"))]
    return {line["round"]: float(line["seconds"]) for line in good if isinstance(line.get("round"), int)}


def _is_duration(seconds: Any) -> bool:
    return isinstance(seconds, (int, float)) and 0 <= seconds < LONGEST


def _timing(record: Mapping[str, Any]) -> str:
    return json.dumps({"round": record["round"], "seconds": record["seconds"]}) + "\n"


def _is_longer(known: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    before, after = known.get("rounds"), now.get("rounds")
    return isinstance(before, int) and isinstance(after, int) and before < after


def _before(history: bytes, number: int) -> bytes:
    """Return the lines of a history up to a round."""
    lines = history.splitlines(keepends=True)
    return b"".join(line for line in lines if json.loads(line)["round"] < number)


def _compare(folder: Path, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in {**known, **now}:
        if known.get(key) != now.get(key):
            names = {"data": "other data", "start": "another start"}
            shown = names.get(key) or f"{key}={_word(known.get(key))}, not {_word(now.get(key))}"
            raise BadRun(
                f"the run in {folder} was begun with {shown}; resume it with what it began with, or give a new directory"
            )


def _word(value: Any) -> str:
    return "its default" if value is None else repr(value)
