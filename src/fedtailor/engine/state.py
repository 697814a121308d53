"""State: what a run carries from round to round, and a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fedtailor.runs.store import Store
from fedtailor.task.device import moved


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state after an earlier round, with which the run is to end."""

    round: int
    shared: Any
    server: Any
    store: Any  # as ``Store.dump`` gives it

    def dump(self) -> Any:
        return {"round": torch.tensor(self.round), "shared": self.shared, "server": self.server, "store": self.store}


@dataclass
class State:
    """The state that a run carries from round to round."""

    shared: Any
    server: Any
    store: Store
    records: list[dict[str, Any]] = field(default_factory=list)
    sent: Any = None  # what the server would send now (``Sent``); ``play_on`` keeps it
    snapshot: Snapshot | None = None

    @property
    def stopped(self) -> str | None:
        """Return why the run ended before its last round; None where it did not."""
        return self.records[-1].get("stopped") if self.records else None

    @property
    def reported(self) -> int:
        """The number of the round whose state the run ends with."""
        return len(self.records) - 1 if self.snapshot is None else self.snapshot.round

    def keep(self) -> None:
        """Remember the state of the last round, to end with it."""
        self.snapshot = Snapshot(len(self.records) - 1, self.shared, self.server, self.store.dump())

    def go_back(self) -> None:
        """Take the state that was kept, if one was."""
        if self.snapshot is not None:
            self.shared, self.server, self.store = self.snapshot.shared, self.snapshot.server, self.store.like()
            self.store.fill(self.snapshot.store)

    def dump(self) -> Any:
        """Return all of it as one tree."""
        return {**self.trees(), "store": self.store.dump()}

    def trees(self) -> Any:
        """Return all of it but the store."""
        out = {"shared": self.shared, "server": self.server}
        return out if self.snapshot is None else {**out, "kept": self.snapshot.dump()}

    def restore(self, dumped: Any, records: list[dict[str, Any]]) -> None:
        """Take back what ``dump`` gave, onto the device of the store."""
        self.records, device = list(records), self.store.device
        self.shared, self.server = moved(dumped["shared"], device), moved(dumped["server"], device)
        self.store.fill(dumped["store"])
        self.store.changed[:] = False
        if (snapshot := dumped.get("kept")) is not None:
            shared, server = moved(snapshot["shared"], device), moved(snapshot["server"], device)
            self.snapshot = Snapshot(int(snapshot["round"]), shared, server, snapshot["store"])
