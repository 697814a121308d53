"""Names that the processes of a network share: environment, files."""

from __future__ import annotations

import json
from pathlib import Path

from fedtailor.errors import InvalidArgument
from fedtailor.runs import files

FOLDER = "FEDTAILOR_NETWORK"  # the environment variable with the server's folder
FAILED = "failed.txt"  # in a run directory: why the run stopped
TRIAL = "-trial.json"  # after the name of a run directory: the file that says what is tried there
SUMMARIES = "summaries.json"  # in such a directory: what the sites say of their fits
NODES = "server/nodes.json"
HOME = "server/flower"
APP = "server/app"


def nodes_of(folder: Path) -> dict[str, int]:
    """Return the node of every client, as registered."""
    try:
        return {str(name): int(node) for name, node in json.loads(files.read(folder / NODES)).items()}
    except FileNotFoundError:
        raise InvalidArgument(f"{folder} has no server yet; start it with: fedtailor sites server {folder}") from None
