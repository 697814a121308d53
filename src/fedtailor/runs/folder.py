"""Folder: the directory of a comparison: its configuration, the tuning of each method, a run directory per method and seed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.runs import files, record
from fedtailor.runs.contents import Contents, note_missing_digests, open_contents, readable, write_manifest
from fedtailor.runs.failure import Failure
from fedtailor.runs.layout import (
    CONFIG,
    ERROR,
    FAILED,
    FORMAT,
    MANIFEST,
    RUNS,
    SIGNATURE,
    SUMMARY,
    TIMING,
    TUNING,
    YARDSTICKS,
    lock,
    refuse_links,
)
from fedtailor.runs.record import Record
from fedtailor.version import __version__

CHANGES_NOTHING = ("address", "workers", "worker_timeout", "device", "checkpoint_every")  # may differ when a comparison goes on
TRIAL = ("settings", "rounds", "score", "loss")  # what tuning keeps of each


class Folder:
    """Writes the directory of a comparison; one process at a time. A finished one is read and not written to."""

    def __init__(self, path: Path, config: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        begun = any((path / name).exists() for name in (CONFIG, SUMMARY, MANIFEST))
        if begun and not resume:
            raise InvalidArgument(f"{path} holds another run; resume it (fedtailor resume {path}) or give a new directory")
        with files.explained(path):
            path.mkdir(parents=True, exist_ok=True)
        refuse_links(path)
        self._lock = lock(path)
        try:
            self._begin(tomllib.loads(tomli_w.dumps(dict(config))), begun)
        except BaseException:
            self.close()
            raise

    def _begin(self, config: Mapping[str, Any], begun: bool) -> None:
        for name in ("", TUNING):
            files.remove_unfinished(self.path / name)
        if not begun:
            files.write(self.path / CONFIG, tomli_w.dumps({"format": FORMAT, "version": __version__, **config}))
        self.contents = open_contents(self.path)
        known = {key: value for key, value in self.contents.config.items() if value != []}  # an empty list is as good as none
        grows = _growth(known, config) if begun else ()
        for key in {**known, **config} if begun else ():
            if key not in ("format", "version", *CHANGES_NOTHING, *grows) and known.get(key) != config.get(key):
                raise BadRun(
                    f"the comparison in {self.path} was begun with another {key}; resume it with that, or give a new directory"
                )

        if any(known.get(key) != config.get(key) for key in grows):
            for name in (MANIFEST, SIGNATURE, SUMMARY):
                (self.path / name).unlink(missing_ok=True)
            files.write(self.path / CONFIG, tomli_w.dumps({"format": FORMAT, "version": __version__, **config}))
            self.contents = open_contents(self.path)

    def of(self, place: str, seed: int, split: int = 0) -> Path:
        """Return the directory of a run; refused where it is not the one that the comparison ended with."""
        name = f"{RUNS}/{place}/{run_name(split, seed)}"
        if self.contents.digests is not None:
            self.contents.inside(name)
        return self.path / name

    def story(self, place: str, split: int = 0) -> dict[str, Any] | None:
        """Return how a method was tuned on a split, if it was."""
        name = story_name(place, split)
        with readable(self.path):
            story = self.contents.json(name)
            if story is not None and not all(set(TRIAL) <= set(trial) for trial in story["trials"]):
                raise BadRun(f"{self.path / name} was changed or cut short; remove it to tune anew")
        return story

    def keep(self, place: str, story: Mapping[str, Any], split: int = 0) -> None:
        """Write how a method was tuned on a split."""
        files.write_json(self.path / story_name(place, split), story)

    def yardsticks(self) -> dict[str, list[Record]] | None:
        """Return the yardsticks of a finished comparison: none where an earlier version finished it; None if it is not."""
        return yardsticks_of(self.contents) if self.contents.finished else None

    def keep_yardsticks(self, yardsticks: Mapping[str, Sequence[Record]]) -> None:
        """Write the yardsticks, a record for every split of each."""
        values = {label: [record.plain(each) for each in records] for label, records in yardsticks.items()}
        files.write_json(self.path / YARDSTICKS, values)

    def add_seconds(self, label: str, seconds: float) -> None:
        """Write down how long a step of a method's tuning took."""
        line = json.dumps({"method": label, "seconds": seconds}) + "\n"
        with files.open_to_append(self.path / TIMING) as file, files.explained(self.path / TIMING):
            file.write(line.encode())

    def seconds(self, label: str) -> float:
        """Return how long a method's tuning took, in this sitting and earlier ones."""
        if self.contents.finished:
            return float((self.contents.json(SUMMARY) or {}).get("tuning_seconds", {}).get(label, 0.0))
        return float(sum(line["seconds"] for line in self.contents.lines(TIMING) if line["method"] == label))

    def failure(self, place: str) -> Failure | None:
        """Return why a method failed, where there is no use in another try: it diverged, or the comparison is finished."""
        folder = f"{RUNS}/{place}"
        with readable(self.path):
            facts = self.contents.json(f"{folder}/{FAILED}")
            if facts is None:
                return None
            if facts["final"] or self.contents.finished:
                return Failure(str(facts["reason"]), final=True)
        for name in (FAILED, ERROR):
            (self.path / folder / name).unlink(missing_ok=True)
        return None

    def fail(self, place: str, failure: Failure) -> None:
        """Write down why a method failed, and where in the code."""
        files.write(self.path / RUNS / place / ERROR, failure.trace)
        files.write_json(self.path / RUNS / place / FAILED, {"reason": failure.reason, "final": failure.final})

    def finish(self, places: Mapping[str, str], summary: Mapping[str, Any]) -> None:
        """Write the summary, then the manifest: from then on the comparison is finished. ``places`` are those of all methods."""
        if self.contents.finished:
            return
        failed = {places[label] for label in summary["failed"]}
        measured = {label: place for label, place in places.items() if place not in failed}
        files.write_json(self.path / SUMMARY, {"methods": measured, **summary})
        runs = [self.path / RUNS / place / name / MANIFEST for place in measured.values() for name in run_names(summary)]
        splits = range(summary.get("splits", 1))
        others = [self.path / story_name(place, split) for place in places.values() for split in splits]
        others.append(self.path / YARDSTICKS)
        others += [self.path / RUNS / place / name for place in failed for name in (FAILED, ERROR)]
        if all(path.exists() for path in runs):  # those that an earlier version finished have none
            paths = [*runs, *(path for path in others if path.exists())]
            write_manifest(self.path, [CONFIG, SUMMARY, *(path.relative_to(self.path).as_posix() for path in paths)])

    def close(self) -> None:
        self._lock.close()


def _growth(known: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that may differ because a comparison is given more: methods beside those it has, or more rounds for
    all of them (settings that were tuned for fewer rounds are others, so not there)."""
    out: tuple[str, ...] = ()
    if all(config.get("set", {}).get(label) == values for label, values in known.get("set", {}).items()):
        out = ("methods", "set")
    if not known.get("tune") and known.get("rounds", 0) < config.get("rounds", 0):
        out = (*out, "rounds", "evaluate_every")
    return out


def read(folder: Path) -> dict[str, list[Record]]:
    """Return the records of a finished comparison (or of one run), from disk alone."""
    with readable(folder):
        contents = open_contents(folder)
        note_missing_digests(contents)
        if contents.config.get("command") == "compare":
            return records_of(contents)
        only = record.read(contents)
        return {only.label: [only]}


def records_of(contents: Contents) -> dict[str, list[Record]]:
    """Return the records of a finished comparison."""
    summary = summary_of(contents)
    spent = summary.get("tuning_seconds", {})
    records: dict[str, list[Record]] = {}
    for label, place in summary["methods"].items():
        records[label] = []
        for split, seed in run_keys(summary):
            run = record.read(contents.inside(f"{RUNS}/{place}/{run_name(split, seed)}"), label)
            more = {"tuning_seconds": spent[label]} if label in spent else {}
            more |= {"split": split, "overlap": summary["overlap"]} if "splits" in summary else {}
            more |= summary.get("privacy", {}) if "noise" in run.summary else {}
            story = contents.json(story_name(place, split))
            records[label].append(replace(run, tuning=story, summary={**run.summary, **more}))
    return records


def yardsticks_in(folder: Path) -> dict[str, list[Record]]:
    """Return the yardsticks of the comparison in a directory; nothing of one run."""
    with readable(folder):
        return yardsticks_of(open_contents(folder))


def yardsticks_of(contents: Contents) -> dict[str, list[Record]]:
    """Return the yardsticks of a comparison; nothing of one run, or where an earlier version made none."""
    values = contents.json(YARDSTICKS) or {}
    return {label: [record.of(label, each) for each in records] for label, records in values.items()}


def run_keys(summary: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the (split, seed) of every run of a method of a finished comparison."""
    seeds = range(summary["seed"], summary["seed"] + summary["seeds"])
    return [(split, seed) for split in range(summary.get("splits", 1)) for seed in seeds]


def run_names(summary: Mapping[str, Any]) -> list[str]:
    return [run_name(split, seed) for split, seed in run_keys(summary)]


def run_name(split: int, seed: int) -> str:
    """Return the name of a run's directory; the first split is the one that the data came with, and needs no number."""
    return f"seed-{seed}" if split == 0 else f"split-{split}-seed-{seed}"


def story_name(place: str, split: int) -> str:
    return f"{TUNING}/{place}.json" if split == 0 else f"{TUNING}/{place}-split-{split}.json"


def failures_of(folder: Path) -> dict[str, str]:
    """Return why methods of a finished comparison failed, by label; nothing of one run."""
    with readable(folder):
        contents = open_contents(folder)
        return {} if contents.config.get("command") != "compare" else dict(summary_of(contents).get("failed", {}))


def summary_of(contents: Contents) -> dict[str, Any]:
    """Return the summary of a finished comparison."""
    contents.require_finished("comparison")
    summary = contents.json(SUMMARY)
    if summary is None:
        raise BadRun(f"{contents.folder / SUMMARY} is missing; restore it from a copy, or train anew")
    return summary
