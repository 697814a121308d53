"""Record: what a run measured, as numbers and words only. It is what reports and tables are made of, live or from disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor import tree
from fedtailor.errors import BadRun
from fedtailor.runs import files
from fedtailor.runs.contents import Contents, digest
from fedtailor.runs.layout import HISTORY, MEASURES, SUMMARY
from fedtailor.runs.names import packed_text, unpacked_text


@dataclass(frozen=True, eq=False)
class Record:
    """A finished run without its parameters.

    ``rounds`` has a line per round (evaluated rounds carry the measures), ``names`` and ``clients`` the measures per client of
    the last evaluation (NaN where one does not apply), ``settings`` the method as one would write it, ``options`` the run's.
    """

    label: str
    kind: str  # classification | regression | multilabel
    summary: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    clients: Mapping[str, NDArray[np.float64]]
    settings: str
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()  # what was assumed about the data
    tuning: Mapping[str, Any] | None = None  # the grid, the scores on validation and the choice


def per_client(names: Sequence[str], clients: Mapping[str, NDArray[np.float64]]) -> list[tuple[str, dict[str, float | None]]]:
    """Return (name, measures), None where a measure does not apply."""
    columns = [[None if v != v else v for v in np.asarray(values, np.float64).tolist()] for values in clients.values()]
    return [(name, dict(zip(clients, row, strict=True))) for name, row in zip(names, zip(*columns, strict=True), strict=True)]


def lines_per_client(number: int, names: Sequence[str], clients: Mapping[str, NDArray[np.float64]]) -> str:
    """Return a line of json per client with its measures in a round, as ``json.dumps`` would write it: a column at a time, since
    there may be very many clients."""
    keys = "".join(f", {json.dumps(key).replace('%', '%%')}: %s" for key in clients)
    template = f'{{"round": {number}, "client": %s{keys}}}\n'
    columns = [map(_number, np.asarray(values, np.float64).tolist()) for values in clients.values()]
    return "".join(template % row for row in zip(map(json.dumps, names), *columns, strict=True))


def measures_file(number: int) -> str:
    """Return where the measures of very many clients in a round are."""
    return f"{MEASURES}/round-{number:07d}.safetensors"


def write_measures(folder: Path, number: int, names: Sequence[str], clients: Mapping[str, NDArray[np.float64]]) -> str:
    """Write the measures of very many clients in a round as a file of numbers; return the line of json that says where."""
    data = tree.pack(
        {"names": packed_text(names), "columns": {key: torch.from_numpy(np.asarray(v)) for key, v in clients.items()}}
    )
    name = measures_file(number)
    files.write(folder / name, data)
    return json.dumps({"round": number, "client": None, "file": name, "sha256": digest(data)}) + "\n"


def _read_measures(contents: Contents, line: Mapping[str, Any]) -> tuple[list[str], dict[str, NDArray[np.float64]]]:
    """Return the names and the measures that ``write_measures`` wrote."""
    data = contents.read(line["file"]) or b""
    if not line["file"].startswith(f"{MEASURES}/") or digest(data) != line["sha256"]:
        raise BadRun(f"{contents.folder / line['file']} was changed or is missing; restore it from a copy, or train anew")
    measured = tree.unpack(data)
    return unpacked_text(measured["names"]), {key: values.numpy() for key, values in measured["columns"].items()}


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else "null" if value != value else json.dumps(value)


def plain(record: Record) -> dict[str, Any]:
    """Return a record without rounds, of what is no run, as plain values."""
    return {"kind": str(record.kind), "summary": dict(record.summary), "clients": dict(per_client(record.names, record.clients))}


def of(label: str, values: Mapping[str, Any]) -> Record:
    """Return the record that ``plain`` wrote."""
    names, summary = list(values["clients"]), values["summary"]
    columns = {
        key: np.array([np.nan if own[key] is None else own[key] for own in values["clients"].values()], np.float64)
        for key in next(iter(values["clients"].values()), {})
    }
    return Record(label, values["kind"], summary, [], names, columns, summary["settings"])


def columns_of(contents: Contents, number: int, names: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """Return the measures per client that the history holds of round ``number``, NaN where there is none."""
    lines = [line for line in contents.lines(HISTORY) if "client" in line and line["round"] == number]
    if not any("file" in line for line in lines):
        return _columns(lines, names)
    known, columns = _read_measures(contents, lines[-1])
    if known == list(names):
        return columns
    places = {name: i for i, name in enumerate(known)}
    order = np.array([places[name] for name in names], np.int64)
    return {key: values[order] for key, values in columns.items()}


def _columns(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    places = {name: i for i, name in enumerate(names)}
    columns: dict[str, NDArray[np.float64]] = {}
    for line in lines:
        for key, value in line.items():
            if key not in ("round", "client"):
                if key not in columns:
                    columns[key] = np.full(len(names), np.nan)
                columns[key][places[line["client"]]] = np.nan if value is None else value
    return columns


def read(contents: Contents, label: str | None = None) -> Record:
    """Return the record of a finished run, from its directory alone."""
    contents.require_finished()
    summary = contents.json(SUMMARY)
    lines = contents.lines(HISTORY)
    if summary is None or not lines:
        raise BadRun(f"{contents.folder} lacks its {HISTORY if summary else SUMMARY}; restore it from a copy, or train anew")
    reported = summary.get("kept_round", summary["rounds"] - 1)
    last = [line for line in lines if "client" in line and line["round"] == reported]
    if any("file" in line for line in last):
        names, clients = _read_measures(contents, last[-1])
    else:
        names = [line["client"] for line in last]
        clients = _columns(last, names)
    return Record(
        label=label or summary["algorithm"],
        kind=summary["kind"],
        summary=summary,
        rounds=[line for line in lines if "client" not in line],
        names=names,
        clients=clients,
        settings=summary["settings"],
        options={k: v for k, v in contents.config.items() if k not in ("set", "format", "version")},
        notes=summary.get("notes", ()),
        tuning=summary.get("tuning"),
    )
