"""Record: what a run measured, as numbers and words only. It is what reports and tables are made of, live or from disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import BadRun
from fedtailor.runs.contents import Contents
from fedtailor.runs.layout import HISTORY, SUMMARY


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
    """(name, measures), None where a measure does not apply."""
    columns = [[None if v != v else v for v in np.asarray(values, np.float64).tolist()] for values in clients.values()]
    return [(name, dict(zip(clients, row, strict=True))) for name, row in zip(names, zip(*columns, strict=True), strict=True)]


def lines_per_client(number: int, names: Sequence[str], clients: Mapping[str, NDArray[np.float64]]) -> str:
    """Return a line of json per client with its measures in a round, as ``json.dumps`` would write it: a column at a time, since
    there may be very many clients."""
    keys = "".join(f", {json.dumps(key).replace('%', '%%')}: %s" for key in clients)
    template = f'{{"round": {number}, "client": %s{keys}}}\n'
    columns = [map(_number, np.asarray(values, np.float64).tolist()) for values in clients.values()]
    return "".join(template % row for row in zip(map(json.dumps, names), *columns, strict=True))


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
    return _columns([line for line in contents.lines(HISTORY) if "client" in line and line["round"] == number], names)


def _columns(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    places = {name: i for i, name in enumerate(names)}
    columns: dict[str, NDArray[np.float64]] = {}
    for line in lines:
        for key, value in line.items():
            if key not in ("round", "client"):
                column = columns.setdefault(key, np.full(len(names), np.nan))
                column[places[line["client"]]] = np.nan if value is None else value
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
    names = [line["client"] for line in last]
    return Record(
        label=label or summary["algorithm"],
        kind=summary["kind"],
        summary=summary,
        rounds=[line for line in lines if "client" not in line],
        names=names,
        clients=_columns(last, names),
        settings=summary["settings"],
        options={k: v for k, v in contents.config.items() if k not in ("set", "format", "version")},
        notes=summary.get("notes", ()),
        tuning=summary.get("tuning"),
    )
