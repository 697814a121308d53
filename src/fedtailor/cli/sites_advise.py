"""``sites advise``: the two questions of an advice, put to the sites of a network by its server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor.cli.base import say
from fedtailor.cli.sites_run import train
from fedtailor.errors import InvalidArgument

if TYPE_CHECKING:
    from fedtailor.sites.project import Network
    from fedtailor.sites.trial import Trial

ADVICE = "advice.json"


def ask(network: Network, rounds: int | None) -> tuple[dict[str, Any], Path]:
    """Return (the advice, the file it is in), from the sites that allow it."""
    from fedtailor.advisor.across import advise
    from fedtailor.runs import files
    from fedtailor.sites.names import SUMMARIES, TRIAL

    if network.pseudonyms:
        raise InvalidArgument("an advice pairs the sites' scores by name, and these sites agreed on pseudonyms; none is given")
    folder = _next(network.folder / "advice")

    def played(name: str, trial: Mapping[str, Any]) -> Path:
        out = folder / name
        files.write_json(out.with_name(out.name + TRIAL), dict(trial))
        train(network, out, False, lambda record: None)
        return out

    def look() -> Mapping[str, Any]:
        say("asking every site for a summary of its fit")
        return json.loads((played("look", {}) / SUMMARIES).read_text())

    def play(label: str, trial: Trial) -> dict[str, dict[str, float]]:
        say(f"trying {label} for {trial.rounds} {'round' if trial.rounds == 1 else 'rounds'}")
        return scores(played(re.sub(r"[^\w.]+", "-", label), trial.plain()))

    advice = advise(network.agreed, look, play, rounds)
    files.write_json(folder / ADVICE, advice)
    return advice, folder / ADVICE


def scores(out: Path) -> dict[str, dict[str, float]]:
    """Return every site's scores after the last round of a run."""
    from fedtailor.runs.layout import HISTORY

    lines = [json.loads(line) for line in (out / HISTORY).read_text().splitlines()]
    last = max(line["round"] for line in lines)
    return {line["client"]: line for line in lines if line["round"] == last and "client" in line}


def _next(folder: Path) -> Path:
    done = [int(path.name) for path in folder.glob("[0-9]*")] if folder.is_dir() else []
    return folder / str(max(done, default=0) + 1)
