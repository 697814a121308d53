"""Where the methods of a comparison are tuned and run, one after another or on a cluster, split by split and seed by seed."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.data.redeal import fits_anew, folded, redealt
from fedtailor.engine import tune as tuning
from fedtailor.engine import yardsticks
from fedtailor.engine.ledger import Ledger
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import prepare
from fedtailor.engine.repeats import Repeats
from fedtailor.engine.run import Callback, run
from fedtailor.engine.spread import Spread
from fedtailor.runs.failure import Failure, blameless
from fedtailor.runs.folder import Folder
from fedtailor.runs.history import Run
from fedtailor.runs.patience import stop_if_noted
from fedtailor.runs.record import Record

Grid = Mapping[str, Sequence[float]]


class Listener:
    """Passes records on to the user's callback, and knows an error of the callback from one of a method."""

    def __init__(self, callback: Callback | None) -> None:
        self.callback = callback
        self.error: BaseException | None = None

    def about(self, label: str, stage: str, split: int, seed: int) -> Callback | None:
        """Return the callback for the runs of a method, which adds their label, stage, split and seed."""
        if self.callback is None:
            return None
        callback = self.callback

        def tell(record: dict[str, Any]) -> None:
            try:
                callback({**record, "label": label, "stage": stage, "split": split, "seed": seed})
            except BaseException as error:
                self.error = error
                raise

        return tell


@dataclass(frozen=True, eq=False)
class Contest:
    """Where methods are tuned and run, and what has come of it so far: the runs of the first split by label, the records of the
    other splits, how each method was tuned, and why methods failed."""

    federation: Federation
    model: Any
    options: Options
    repeats: Repeats
    tune: bool
    grid: Grid | None
    folder: Folder | None
    listener: Listener
    spread: Spread | None = None
    runs: dict[str, list[Run]] = field(default_factory=dict)
    others: dict[str, list[Record]] = field(default_factory=dict)
    stories: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    entered: dict[str, list[tuple[Algorithm, Mapping[str, Any]]]] = field(default_factory=dict)
    _dealt: dict[int, Federation] = field(default_factory=dict)

    def dealt(self, split: int) -> Federation:
        """Return the rows as a split deals them; those of a table, which is read again for each, are kept."""
        if split in self._dealt:
            return self._dealt[split]
        repeats = self.repeats
        federation = folded(self.federation, split, repeats.splits) if repeats.folds else redealt(self.federation, split)
        if fits_anew(self.federation):
            self._dealt[split] = federation
        return federation

    def send_ahead(self, methods: Mapping[str, Algorithm]) -> None:
        """Let a cluster begin with all runs of methods that need no tuning."""
        for split in range(self.repeats.splits) if self.spread is not None and not self.tune else ():
            for label, algorithm in methods.items():
                if self.folder is None or self.folder.failure(place(label)) is None:
                    self._send(label, algorithm, self.dealt(split), split)

    def _send(self, label: str, algorithm: Algorithm, federation: Federation, split: int) -> None:
        """Let a cluster, if there is one, begin with the runs of a method on a split."""
        if self.spread is not None:
            for seed in self.repeats.all_seeds:
                out = self._out(label, split, seed)
                self.spread.send((label, split, seed), algorithm, federation, self.options.but(seed=seed), out)

    def enter(self, label: str, algorithm: Algorithm, error: Exception | None) -> None:
        """Tune and run a method, or write down why it fails; ``error`` is what its rehearsal came to."""
        where, every = "", range(self.repeats.splits)
        self.entered[label] = [(algorithm, {}) for _ in every] if error is None else []  # what takes no step spends nothing
        if self.folder is not None and (failure := self.folder.failure(place(label))) is not None:
            self.failures[label] = failure
            stories = [self.folder.story(place(label), split) or {} for split in every]
            self.entered[label] = [(algorithm, story) for story in stories] if error is None else []
            return
        runs: list[Run] = []
        records: list[Record] = []
        try:
            if error is not None:
                raise error
            for split in every:
                federation = self.dealt(split)
                method, story = self._tuned(label, algorithm, federation, split) if self.tune else (algorithm, {})
                self.entered[label][split] = (method, story)
                self._send(label, method, federation, split)
                for seed in self.repeats.all_seeds:
                    where = self._where(split, seed)
                    done = self._run(label, method, federation, split, seed)
                    if split == 0:
                        runs.append(done)
                    else:
                        record = replace(done.record(label), tuning=story or None)
                        records.append(replace(record, summary={**done.summary, "split": split}))
            self.runs[label], self.others[label] = runs, records
        except Exception as caught:
            stop_if_noted()
            if caught is self.listener.error or blameless(caught):
                raise
            self.failures[label] = Failure.of(caught, where)
            if self.folder is not None:
                self.folder.fail(place(label), self.failures[label])

    def _where(self, split: int, seed: int) -> str:
        parts = [f"split {split}"] if self.repeats.splits > 1 else []
        parts += [f"seed {seed}"] if self.repeats.seeds > 1 else []
        return f"{', '.join(parts)}: " if parts else ""

    def _tuned(self, label: str, algorithm: Algorithm, federation: Federation, split: int) -> tuple[Algorithm, Mapping[str, Any]]:
        """Return (the method as tuned on this split, the story); the seconds it took in this and earlier sittings are added."""
        name, began = place(label), time.perf_counter()
        callback = self.listener.about(label, "tune", split, self.options.seed)
        trials = tuning.Trials(federation, self.model, self.options, self.grid, callback, self.spread)
        folder = self.folder

        def keep(story: dict[str, Any]) -> None:
            nonlocal began
            self.entered[label][split] = (algorithm, story)  # also of a tuning that comes to nothing: its trials were played
            if folder is None or folder.contents.finished:
                return
            folder.keep(name, story, split)
            folder.add_seconds(label, -began + (began := time.perf_counter()))

        method, story = tuning.tune(algorithm, trials, None if folder is None else folder.story(name, split), keep)
        took = self.seconds.get(label, 0.0) + time.perf_counter() - began
        self.seconds[label] = took if folder is None else folder.seconds(label)
        if split == 0:
            self.stories[label] = story
        return method, story

    def _out(self, label: str, split: int, seed: int) -> Path | None:
        return None if self.folder is None else self.folder.of(place(label), seed, split)

    def _run(self, label: str, algorithm: Algorithm, federation: Federation, split: int, seed: int) -> Run:
        out, callback = self._out(label, split, seed), self.listener.about(label, "train", split, seed)
        options, key = self.options.but(seed=seed), (label, split, seed)
        if self.spread is not None and key in self.spread:
            return self.spread.fetch(
                key, out, callback, lambda there: run(algorithm, federation, self.model, options, out=there, resume=True)
            )
        return run(algorithm, federation, self.model, options, out=out, resume=out is not None, callback=callback)

    def yardsticks(self, names: Sequence[str]) -> dict[str, list[Record]]:
        """Return the yardsticks, a record for every split; none where a method is private, since they would look at the rows."""
        if not names or self._is_private():
            return {}
        if self.folder is not None and (stored := self.folder.yardsticks()) is not None:
            return stored
        out: dict[str, list[Record]] = {}
        for split in range(self.repeats.splits):
            where = yardsticks.Setting(self.dealt(split), self.model, self.options, self._local(), self.grid, self.tune)
            for label, record in yardsticks.make(names, where).items():
                out.setdefault(label, []).append(replace(record, summary={**record.summary, "split": split}))
        if self.folder is not None:
            self.folder.keep_yardsticks(out)
        return out

    def _is_private(self) -> bool:
        methods = [method for entries in self.entered.values() for method, _ in entries]
        return self.options.user_clip is not None or any(method.opt.privacy is not None for method in methods)

    def _local(self) -> Algorithm:
        """Return local training as it was entered; if it was not, with the step size and the work of the first method."""
        methods = [entries[0][0] for entries in self.entered.values() if entries]
        known = next((method for method in methods if type(method) is yardsticks.ALONE), None)
        if known is not None or not methods:
            return known or yardsticks.ALONE()
        shared = {name: getattr(methods[0], name, None) for name in ("lr", "steps", "epochs")}
        known_work: dict[str, Any] = {name: value for name, value in shared.items() if isinstance(value, int | float)}
        return yardsticks.ALONE(**known_work)

    def spent(self) -> dict[str, Any]:
        """Return what all trials and runs together have spent, those of methods that failed included."""
        ledger = Ledger()
        for entries in self.entered.values():
            for split, (algorithm, story) in enumerate(entries):
                if algorithm.opt.privacy is None and self.options.user_clip is None:
                    continue
                federation = self.dealt(split)
                for trial in story.get("trials", ()):
                    options = self.options.but(rounds=trial["rounds"], evaluate_every=0, patience=None, callbacks=())
                    ledger.add(prepare(replace(algorithm, **trial["settings"]), federation, self.model, options))
                for seed in self.repeats.all_seeds:
                    ledger.add(prepare(algorithm, federation, self.model, self.options.but(seed=seed)))
        return ledger.total()


def place(label: str) -> str:
    """Return a label as a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.") or "method"
