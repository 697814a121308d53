"""A small network in one process, and the same run in the loop engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fedtailor as ft
from fedtailor.engine.options import Options
from fedtailor.sites.agreed import Agreed, Rows
from fedtailor.sites.local import InProcess
from fedtailor.sites.server import Conductor, Terms

NAMES = ("Aarhus", "Bergen", "Cork", "Delft", "Espoo")


def federation(classes: int = 3, rows: int = 24, public: int = 0) -> ft.Federation:
    """Five clients of different sizes, with validation rows."""
    draw = np.random.default_rng(7)

    def part(count: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        x = draw.normal(size=(count, 4)) + 0.3 * client
        return x, (np.abs(x.sum(1) + client) % classes).astype(int)

    def parts(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [part(count + i, i) for i in range(len(NAMES))]

    rows_of = {"train": parts(rows), "test": parts(9), "val": parts(6)}
    more = {"public": draw.normal(size=(public, 4))} if public else {}
    return ft.Federation.from_arrays(**rows_of, **more, names=NAMES, classes=[str(i) for i in range(classes)])


def agree(method: ft.Algorithm, fed: ft.Federation, model: str = "linear", **options: object) -> Agreed:
    given = {"rounds": 4, "batch_size": 8, "dtype": "float64", "evaluate_every": 2, **options}
    return Agreed(method, model, Options.of(given), fed.names, Rows.of(fed))


def conduct(agreed: Agreed, fed: ft.Federation, folder: Path, **terms: object) -> Conductor:
    transport = InProcess.of(agreed, fed, folder / "sites")
    return Conductor(agreed, transport, folder / "server", Terms(**{"pause": 0.0, **terms}))


def loop(agreed: Agreed, fed: ft.Federation, **options: object) -> ft.Run:
    given = agreed.options.but(engine="loop", workers=1, **options)
    return ft.run(agreed.algorithm, fed, agreed.model, given)
