"""The data that a finished run was made with, found again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedtailor.cli.base import say
from fedtailor.errors import InvalidArgument, ModelMismatch

if TYPE_CHECKING:
    from fedtailor.data.federation import Federation
    from fedtailor.runs.models import Saved


def own_federation(folder: Path, saved: Saved, rows: Path | None) -> tuple[Federation, Federation, Path]:
    """The federation that a run was made with, as read and as trained on, and where it lies; another one is refused."""
    from fedtailor.config import RunSettings
    from fedtailor.engine.prepare import readied
    from fedtailor.runs.config import fingerprint
    from fedtailor.runs.contents import open_contents
    from fedtailor.runs.layout import IDENTITY

    if "data" not in saved.config:
        raise InvalidArgument("the run was made in Python, from a federation that no command makes; do the same there")
    path = Path(saved.config["data"]) if rows is None else rows
    if (rows is not None or saved.schema is not None) and not path.exists():
        raise InvalidArgument(f"the run's table {str(path)!r} is not there any more; give it after RUN")
    settings = RunSettings.of({**saved.config, "data": str(path)}, f"{folder}: ")
    federation = settings.federation()
    ready = readied(federation, settings.options())[0]
    identity = open_contents(folder).json(IDENTITY)
    if identity is None:
        say("whether the table is that of the run cannot be checked: checkpoints/identity.json is not there")
    elif identity.get("data") != fingerprint(ready):
        raise ModelMismatch(f"{str(path)!r} is not the table that the run was made with, or it was changed since; give that one")
    return federation, ready, path
