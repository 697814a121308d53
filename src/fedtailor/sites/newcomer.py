"""A site that comes after the run: it gets the shared model and the schema, works on its own rows, and sends nothing back."""

from __future__ import annotations

from pathlib import Path

import torch

from fedtailor.engine.onboard import Onboarded, onboard
from fedtailor.errors import InvalidArgument
from fedtailor.runs import files, models, onboarded
from fedtailor.runs.layout import CONFIG, MANIFEST, MODELS
from fedtailor.sites.house import newest_run
from fedtailor.sites.project import SCHEMA, Network
from fedtailor.sites.table import AgreedTable

MODEL = "model"  # in the folder of a newcomer: the shared model, as a run directory


def invite(network: Network, to: Path) -> Path:
    """Write what a newcomer needs: the shared model of the last finished run and the schema; no score, no key, nobody's rows."""
    run = newest_run(network.folder)
    if run is None:
        raise InvalidArgument(f"there is no finished run in {network.folder}; train one with: fedtailor sites start")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InvalidArgument(f"{to} exists and is not empty; give a new directory")
    saved = models.read(run)
    if ":" in saved.facts["method"]:
        raise InvalidArgument(
            "the method is in a file of its own, which a newcomer would have to trust; invite it to a new network"
        )
    if not saved.has_shared:
        raise InvalidArgument(f"{saved.facts['algorithm']} has no shared model to give to a newcomer; use another method")
    for name in (CONFIG, MANIFEST, *(f"{MODELS}/{path.name}" for path in sorted((run / MODELS).iterdir()))):
        files.write(to / MODEL / name, files.read(run / name))
    files.write(to / SCHEMA, files.read(network.folder / SCHEMA))
    return to


def join(folder: Path, data: Path, client: str, rounds: int | None = None) -> tuple[Onboarded, Path]:
    """Return (a newcomer's model, judged on rows it has not seen; the file it is in), from the folder that ``invite`` wrote."""
    if not (folder / MODEL).is_dir():
        raise InvalidArgument(f"{folder} is no invitation; let the network's operator make one: fedtailor sites invite")
    own = AgreedTable.read(folder / SCHEMA).federation(data, client)
    parts = [part.client(0) for part in (own.train, own.test, own.val) if part is not None]
    saved = models.read(folder / MODEL)
    new = onboard(saved, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), client, rounds)
    newcomer = onboarded.Newcomer(new.personal, new.moments, new.record)
    return new, onboarded.write(folder / MODEL, client, newcomer, saved.facts["sha256"])
