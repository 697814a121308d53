"""What was measured, on disk: DIR/PAPER/EXPERIMENT/SCALE/seed-N.json, beside the figure and its numbers.

``stored/PAPER-EXPERIMENT.json`` of the package has what was measured earlier, at the scale ``laptop``, of experiments that take
long: it counts for the seeds that DIR lacks, as long as the settings are the same.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedtailor.errors import InvalidData
from fedtailor.papers.base import Experiment, Pieces, Scale, Settings
from fedtailor.runs import files
from fedtailor.version import __version__

STORED = Path(__file__).parent / "stored"
BySeed = dict[int, list[dict[str, Any]]]


def place(out: Path, name: str, scale: Scale) -> Path:
    """Return the folder of an experiment at a scale."""
    return out / name / scale


def read(out: Path, name: str, experiment: Experiment, scale: Scale, seeds: int) -> BySeed:
    """Return the rows of the seeds that were measured with the present settings."""
    settings, known = json.loads(json.dumps(experiment.settings[scale])), BySeed()
    earlier = STORED / f"{name.replace('/', '-')}.json"
    if scale == "laptop" and earlier.exists():
        stored = json.loads(earlier.read_text("utf-8"))
        if stored["settings"] == settings:
            known |= {int(seed): list(rows) for seed, rows in stored["seeds"].items() if int(seed) < seeds}
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
    if known and experiment.means_of:
        return known
    settings, folder = experiment.settings[scale], place(out, name, scale)
    for seed in range(seeds):
        if seed not in known:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"seed-{seed}.json"
            pieces = kept_pieces(path, name, experiment, settings, seed, tell)
            known[seed] = [row for piece in pieces for row in piece["rows"]]
            took = {key: round(sum(piece[key] for piece in pieces), 2) for key in ("seconds", "cpu_seconds")}
            value = {"experiment": name, "scale": scale, "seed": seed, "version": __version__, "took": took}
            files.write_json(path, {**value, "settings": settings, "rows": known[seed]})
            unfinished(path).unlink(missing_ok=True)
    return {seed: known[seed] for seed in sorted(known)}


def unfinished(path: Path) -> Path:
    """Return where the pieces of a seed are kept until all are done."""
    return path.with_suffix(".pieces.json")


def kept_pieces(
    path: Path, name: str, experiment: Experiment, settings: Settings, seed: int, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the pieces of a seed with what they took; those that an earlier call finished with these settings are not measured
    again."""
    whole = experiment.measure
    pieces = whole if isinstance(whole, Pieces) else Pieces(lambda _: [""], lambda settings, seed, _: whole(settings, seed))
    same = json.loads(json.dumps(settings))
    found = json.loads(files.read(unfinished(path))) if unfinished(path).exists() else {}
    done: dict[str, dict[str, Any]] = found["pieces"] if found.get("settings") == same else {}
    for piece in pieces.names(settings):
        if piece not in done:
            tell(f"{name}, seed {seed}{f', {piece}' if piece else ''}: measuring")
            wall, cpu = time.perf_counter(), time.process_time()
            rows = pieces.rows(settings, seed, piece)
            done[piece] = {"rows": rows, "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
            if piece:
                files.write_json(unfinished(path), {"settings": settings, "pieces": done})
    return [done[piece] for piece in pieces.names(settings)]


def cpu_seconds(out: Path, name: str, scale: Scale, seeds: int) -> float | None:
    """Return what the seeds took to measure, all together; None where that is not known of each."""
    paths = [place(out, name, scale) / f"seed-{seed}.json" for seed in range(seeds)]
    kept = [json.loads(files.read(path)).get("took") for path in paths if path.exists()]
    return sum(float(took["cpu_seconds"]) for took in kept) if len(kept) == seeds and all(kept) else None


def as_csv(by_seed: BySeed) -> str:
    """Return all rows as a table, with the seed of each."""
    names = list(dict.fromkeys(key for rows in by_seed.values() for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, ["seed", *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"seed": seed, **row} for seed, rows in by_seed.items() for row in rows)
    return text.getvalue()
