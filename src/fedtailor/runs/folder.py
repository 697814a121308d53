"""Folder: the directory of a comparison: its configuration, the tuning of each method, a run directory per method and seed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from fedtailor.errors import BadRun, FedtailorError, InvalidArgument
from fedtailor.runs import files, record
from fedtailor.runs.layout import CONFIG, FORMAT, RUNS, SUMMARY, TUNING, check_version, lock, read_json
from fedtailor.runs.record import Record
from fedtailor.version import __version__

CHANGES_NOTHING = ("workers", "device", "checkpoint_every")  # may differ when a comparison goes on
TRIAL = ("settings", "rounds", "score", "loss")  # what tuning keeps of each


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Files that were tampered with are refused, whatever it is that they break."""
    try:
        yield
    except FedtailorError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadRun(f"{folder} holds a file that was changed or cut short ({why}); restore it, or train anew") from error


class Folder:
    def __init__(self, path: Path, config: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        holds = any((path / name).exists() for name in (CONFIG, SUMMARY))
        if holds and not resume:
            raise InvalidArgument(f"{path} holds another run; resume it (fedtailor resume {path}) or give a new directory")
        with files.saying(path):
            path.mkdir(parents=True, exist_ok=True)
        self._held = lock(path)
        try:
            self._settle(config, holds)
        except BaseException:
            self.close()
            raise

    def _settle(self, config: Mapping[str, Any], holds: bool) -> None:
        now = tomllib.loads(tomli_w.dumps(dict(config)))
        if not holds:
            files.write(self.path / CONFIG, tomli_w.dumps({"format": FORMAT, "version": __version__, **now}))
            return
        known = check_version(self.path)
        for key in {**known, **now}:
            if key not in ("format", "version", *CHANGES_NOTHING) and known.get(key) != now.get(key):
                raise BadRun(
                    f"the comparison in {self.path} was begun with another {key}; resume it with that, or give a new directory"
                )

    def of(self, place: str, seed: int) -> Path:
        """The run directory of a method and seed."""
        return self.path / RUNS / place / f"seed-{seed}"

    def story(self, place: str) -> dict[str, Any] | None:
        path = self.path / TUNING / f"{place}.json"
        with readable(self.path):
            found = read_json(path)
            if found is not None and not all(set(TRIAL) <= set(trial) for trial in found["trials"]):
                raise BadRun(f"{path} was changed or cut short; remove it to tune anew")
        return found

    def keep(self, place: str, story: Mapping[str, Any]) -> None:
        files.write_json(self.path / TUNING / f"{place}.json", story)

    def finish(self, places: Mapping[str, str], seed: int, seeds: int, table: list[dict[str, Any]]) -> None:
        files.write_json(self.path / SUMMARY, {"methods": dict(places), "seed": seed, "seeds": seeds, "table": table})

    def close(self) -> None:
        self._held.close()


def read(folder: Path) -> dict[str, list[Record]]:
    """The records of a finished comparison (or of one run), from disk alone."""
    with readable(folder):
        if check_version(folder).get("command") == "compare":
            return _comparison(folder)
        found = record.read(folder)
        return {found.label: [found]}


def _comparison(folder: Path) -> dict[str, list[Record]]:
    summary = read_json(folder / SUMMARY)
    if summary is None:
        raise BadRun(f"the comparison in {folder} is not finished; go on with it: fedtailor resume {folder}")
    out = {}
    for label, place in summary["methods"].items():
        story = read_json(folder / TUNING / f"{place}.json")
        seeds = range(summary["seed"], summary["seed"] + summary["seeds"])
        out[label] = [replace(record.read(folder / RUNS / place / f"seed-{n}", label), tuning=story) for n in seeds]
    return out
