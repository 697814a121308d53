"""What was measured, on disk: DIR/PAPER/EXPERIMENT/SCALE/seed-N.json, beside the figure and its numbers."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtailor.errors import InvalidData
from fedtailor.papers.base import Experiment, Scale
from fedtailor.runs import files
from fedtailor.version import __version__

BySeed = dict[int, list[dict[str, Any]]]


def place(out: Path, name: str, scale: Scale) -> Path:
    """Return the folder of an experiment at a scale."""
    return out / name / scale


def read(out: Path, name: str, experiment: Experiment, scale: Scale, seeds: int) -> BySeed:
    """Return the rows of the seeds that were measured with the present settings."""
    settings, known = json.loads(json.dumps(experiment.settings[scale])), BySeed()
    for seed in range(seeds):
        path = place(out, name, scale) / f"seed-{seed}.json"
        if not path.exists():
            continue
        try:
            stored = json.loads(files.read(path))
            if stored["settings"] == settings:
                known[seed] = list(stored["rows"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidData(f"{path} is not a file of results; remove it to measure again") from error
    return known


def measured(
    out: Path, name: str, experiment: Experiment, scale: Scale, seeds: int, tell: Callable[[str], None] = lambda words: None
) -> BySeed:
    """Return the rows of all seeds; what is missing is measured and kept."""
    known = read(out, name, experiment, scale, seeds)
    for seed in range(seeds):
        if seed not in known:
            tell(f"{name}, seed {seed}: measuring")
            known[seed] = experiment.measure(experiment.settings[scale], seed)
            value = {"experiment": name, "scale": scale, "seed": seed, "version": __version__}
            folder = place(out, name, scale)
            folder.mkdir(parents=True, exist_ok=True)
            files.write_json(folder / f"seed-{seed}.json", {**value, "settings": experiment.settings[scale], "rows": known[seed]})
    return {seed: known[seed] for seed in sorted(known)}


def as_csv(by_seed: BySeed) -> str:
    """Return all rows as a table, with the seed of each."""
    names = list(dict.fromkeys(key for rows in by_seed.values() for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, ["seed", *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"seed": seed, **row} for seed, rows in by_seed.items() for row in rows)
    return text.getvalue()
