"""The run that a private run starts from: what it has spent of the same rows counts as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.engine.options import Options
from fedtailor.engine.start import FILES, STATE
from fedtailor.errors import InvalidArgument
from fedtailor.runs.config import fingerprint
from fedtailor.runs.contents import open_contents
from fedtailor.runs.layout import IDENTITY, SUMMARY


@dataclass(frozen=True)
class Beginning:
    """What the run in ``place`` has spent: of a row of the client that spends most, on average, and of a whole client (None: no
    bound). ``same_rows`` says that it was trained on the rows of the run that starts from it."""

    place: str
    same_rows: bool
    worst: float | None
    average: float | None
    user: float | None

    def added_to(self, spent: Mapping[str, Any]) -> dict[str, float | None]:
        """Return what both runs come to, where they share their rows: epsilons add up, and so do deltas."""
        if not self.same_rows:
            return {}
        out: dict[str, float | None] = {}
        for name, of_one_run, before in (
            ("epsilon_composed", "epsilon_max", self.worst),
            ("epsilon_composed_mean", "epsilon", self.average),
            ("user_epsilon_composed", "user_epsilon", self.user),
        ):
            now = spent.get(name, spent.get(of_one_run))
            if now is not None:
                out[name] = None if before is None else now + before
        return out


def beginning_of(algorithm: Algorithm, options: Options, federation: Federation) -> Beginning | None:
    """Return what a private run starts from, or None; refused where that saw the same rows without privacy."""
    opt = algorithm.opt.privacy
    if options.start is None or (opt is None and options.user_clip is None):
        return None
    if options.start.startswith(STATE) or options.start.endswith(FILES):  # weights do not say what they have seen
        return Beginning("the weights" if options.start.startswith(STATE) else options.start, False, None, None, None)
    contents = open_contents(Path(options.start))
    contents.require_finished()
    summary, identity = contents.json(SUMMARY) or {}, contents.json(IDENTITY) or {}
    rows = summary if summary.get("noise_secret") else {}
    beginning = Beginning(
        options.start,
        identity.get("data") == fingerprint(federation),
        rows.get("epsilon_composed", rows.get("epsilon_max")),
        rows.get("epsilon_composed_mean", rows.get("epsilon")),
        summary.get("user_epsilon_composed", summary.get("user_epsilon")) if summary.get("user_noise_secret") else None,
    )
    lacks_rows = opt is not None and not opt.force and beginning.worst is None
    lacks_clients = options.user_clip is not None and beginning.user is None
    if beginning.same_rows and (lacks_rows or lacks_clients):
        unit = "rows" if lacks_rows else "clients"
        raise InvalidArgument(
            f"the run in {options.start}, which is the start, was trained on the same {unit} and did not protect them; "
            "start from a private run, or from one on other data"
        )
    return beginning
