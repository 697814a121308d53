"""The runs and trials of a comparison as tasks of a cluster: each is played whole, in one process of a node.

A run on shards has the same bits for any number of them, one included; so several runs are played at once, each in one shard,
and come back as the files of their directories.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.engine.options import Options
from fedtailor.engine.run import Callback, run
from fedtailor.runs.history import Run

Key = tuple[str, int, int]  # label, split, seed
Records = list[dict[str, Any]]
Files = dict[str, bytes]  # of a directory, by their paths in it


class Spread:
    """The cluster as a comparison uses it."""

    def __init__(self, model: Any, options: Options) -> None:
        from fedtailor.engine.nodes import Errands, connect

        self.model = model
        self._sent: dict[Key, Any] = {}
        with connect(options) as session:
            self.errands = Errands(session)

    def close(self) -> None:
        """Leave the cluster."""
        self.errands.close()

    def trials(
        self,
        work: Callable[..., tuple[Any, Records]],
        algorithms: Sequence[Algorithm],
        federation: Federation,
        options: Options,
        callback: Callback | None,
    ) -> Iterator[Any]:
        """Yield what ``work`` comes to with each setting; all are played at once."""
        sent = [self.errands.send(work, algorithm, federation, self.model, options) for algorithm in algorithms]
        for each in sent:
            found, records = self.errands.result(each)
            _tell(records, callback)
            yield found

    def send(self, key: Key, algorithm: Algorithm, federation: Federation, options: Options, out: Path | None) -> None:
        """Ask for a run, unless that was done or its directory is begun."""
        if key not in self._sent and not (out is not None and out.exists() and any(out.iterdir())):
            self._sent[key] = self.errands.send(played, algorithm, federation, self.model, options)

    def __contains__(self, key: Key) -> bool:
        return key in self._sent

    def fetch(self, key: Key, out: Path | None, callback: Callback | None, read: Callable[[Path], Run]) -> Run:
        """Return a run that was asked for, read back from its directory."""
        written, records = self.errands.result(self._sent.pop(key))
        _tell(records, callback)
        with TemporaryDirectory() as spare:
            place = Path(spare) / "run" if out is None else out
            _put(written, place)
            return read(place)


def serves(options: Options, algorithms: Sequence[Algorithm]) -> bool:
    """Return whether whole runs go to the nodes of a cluster. Private ones do not: the key behind their noise would travel
    back."""
    is_private = options.user_clip is not None or any(algorithm.opt.privacy is not None for algorithm in algorithms)
    return options.engine == "ray" and not is_private


def played(algorithm: Algorithm, federation: Federation, model: Any, options: Options) -> tuple[Files, Records]:
    """Play a run and return the files of its directory, and its records."""
    with TemporaryDirectory() as spare:
        place = Path(spare) / "run"
        records = list(run(algorithm, federation, model, options, out=place).history)
        files = {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
        return files, records


def _put(written: Mapping[str, bytes], place: Path) -> None:
    """Write a directory that is there as a whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=place.parent, prefix=".") as spare:
        new = Path(spare) / "run"
        for name, content in written.items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        os.replace(new, place)


def _tell(records: Records, callback: Callback | None) -> None:
    if callback is not None:
        for record in records:
            callback(record)
