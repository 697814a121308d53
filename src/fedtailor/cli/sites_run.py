"""What ``sites start`` and ``sites demo`` share: a run that the server of a network plays, followed from here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor.errors import InvalidArgument, TooFewSites

if TYPE_CHECKING:
    from fedtailor.sites.project import Network

LOOK = 1.0  # seconds between looks at what a process does
ENDED = "finished"


def next_run(network: Network, resume: bool) -> Path:
    """Return the run directory of the next run, or of the last one where it is to go on."""
    done = sorted((network.folder / "runs").glob("[0-9]*"), key=lambda path: int(path.name)) if network.folder.is_dir() else []
    if resume:
        if not done:
            raise InvalidArgument(f"there is no run in {network.folder} to go on with; leave out --resume")
        return done[-1]
    return network.folder / "runs" / str(int(done[-1].name) + 1 if done else 1)


def train(
    network: Network,
    out: Path,
    resume: bool,
    show: Callable[[dict[str, Any]], None],
    look: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Let the server play a run, tell of every round as it ends, and return the summary; ``look`` is called now and then."""
    from fedtailor.runs.layout import HISTORY, SUMMARY
    from fedtailor.sites.names import FAILED
    from fedtailor.sites.processes import commands, runs_of, start_run, why_failed

    (out / FAILED).unlink(missing_ok=True)
    number = start_run(network, str(out.relative_to(network.folder)), resume)
    seen, state = 0, "pending"
    with commands(network) as ask:
        while not state.startswith(ENDED):
            time.sleep(LOOK)
            look()
            state = next((run["status"] for run in runs_of(network, ask) if run["run-id"] == number), f"{ENDED}:lost")
            history = out / HISTORY
            rounds = [line for line in _lines(history) if "client" not in line] if history.exists() else []
            for record in rounds[seen:]:
                show(record)
            seen = max(seen, len(rounds))
    if state == f"{ENDED}:stopped":
        raise TooFewSites(f"the run was stopped; go on with: fedtailor sites start {network.folder} --resume")
    if state != f"{ENDED}:completed":
        raise TooFewSites(why_failed(out) or f"the run ended as {state}; read {network.folder / 'server' / 'superlink.log'}")
    return json.loads((out / SUMMARY).read_text()) if (out / SUMMARY).exists() else {}  # an exchange of summaries has none


def _lines(history: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a history that is being written."""
    return [json.loads(line) for line in history.read_text().split("\n")[:-1]]
